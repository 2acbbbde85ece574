// State and wiring: settings, the server's status, sending and stopping.

import * as api from "./api.js";
import { Answer, addQuestion, clear, showLegend } from "./chat.js";

const $ = (id) => document.getElementById(id);
const KEPT = ["key", "temperature", "seed", "max_tokens", "n_max"];
const POLL_MS = 1000;
const POLL_READY_MS = 10000;
const STATUS = {
  ok: "ready",
  loading: "loading the model…",
  draining: "stopping",
  failed: "failed; see its log",
  unreachable: "no connection",
};

const EXAMPLES = [
  {
    title: "Rename a variable",
    note: "a long copy: easy to guess",
    prompt: `Rename \`items\` to \`entries\` in this function:
def group_by(items, key):
    """Collect items in lists by what key says about them."""
    groups = {}
    for item in items:
        name = key(item)
        if name not in groups:
            groups[name] = []
        groups[name].append(item)
    if not items:
        return {}
    return groups`,
  },
  {
    title: "Continue code",
    note: "new text: harder to guess",
    prompt: `Continue this code:
def read_lines(self, path, encoding='utf-8'):
    """Return the lines of a file as a list."""
    lines = []
    with open(path, encoding=encoding) as file:`,
  },
  {
    title: "Write a docstring",
    note: "short and free",
    prompt: `Write the docstring of this function:
def remove(self, name):
    if name not in self._entries:
        raise KeyError(name)
    entry = self._entries.pop(name)
    entry.close()
    return entry`,
  },
];

let messages = [];
let running = null; // AbortController of the answer being written
let ready = false;

function settings() {
  const body = { temperature: Number($("temperature").value || 0), speculative: { n_max: Number($("n_max").value) } };
  if ($("seed").value !== "") body.seed = Number($("seed").value);
  if ($("max_tokens").value !== "") body.max_tokens = Number($("max_tokens").value);
  return body;
}

async function send(text) {
  if (!ready || running || !text.trim()) return;
  const mine = messages; // a new chat may begin before this answer has ended
  mine.push({ role: "user", content: text });
  $("welcome").hidden = true;
  addQuestion(text);
  const answer = new Answer();
  running = new AbortController();
  showButtons();
  try {
    await write(answer);
  } catch (error) {
    if (running.signal.aborted) answer.finish(null, "stopped");
    else answer.fail(error.message);
    if (error.status === 401) $("key").focus();
  } finally {
    // An answer that is empty or failed must not become part of the next prompt.
    if (answer.text) mine.push({ role: "assistant", content: answer.text });
    else mine.pop();
    running = null;
    showButtons();
  }
}

async function write(answer) {
  let reason = null;
  for await (const chunk of api.chat({ messages, ...settings() }, $("key").value, running.signal)) {
    if (chunk.choices.length) {
      reason = chunk.choices[0].finish_reason ?? reason;
      answer.add(chunk);
    } else {
      answer.finish(chunk, reason);
    }
  }
}

function showButtons() {
  $("send").textContent = running ? "Stop" : "Send";
  $("send").classList.toggle("stop", running !== null);
  $("send").disabled = !ready;
  $("prompt").disabled = !ready;
  for (const button of $("examples").children) button.disabled = !ready || running !== null;
}

function startOver() {
  running?.abort();
  messages = [];
  clear();
  $("welcome").hidden = false;
  $("prompt").focus();
}

// The model's name, its drafters and the longest draft the server makes.
async function readProps() {
  try {
    const props = await api.props($("key").value);
    $("model").textContent = props.model_alias;
    showLegend($("legend"), ["target", ...props.speculation.drafters]);
    const most = props.speculation.drafters.length ? props.speculation.n_max : 0;
    $("n_max").max = most;
    if (localStorage.getItem("n_max") === null) $("n_max").value = most;
    showLimit();
  } catch (error) {
    $("status").textContent = error.status === 401 ? "needs an API key" : error.message;
    $("status").dataset.state = "failed";
  }
}

async function watch() {
  const state = await api.health();
  const was = ready;
  ready = state === "ok";
  if (was !== ready || !ready) {
    $("status").textContent = STATUS[state] ?? state;
    $("status").dataset.state = state;
    showButtons();
  }
  if (ready && !was) {
    await readProps();
    $("prompt").focus();
  }
  setTimeout(watch, ready ? POLL_READY_MS : POLL_MS);
}

function showLimit() {
  $("n_max_value").textContent = $("n_max").value;
}

function showExamples() {
  for (const example of EXAMPLES) {
    const button = document.createElement("button");
    button.type = "button";
    button.disabled = true;
    const title = document.createElement("strong");
    title.textContent = example.title;
    const note = document.createElement("span");
    note.textContent = example.note;
    button.append(title, note);
    button.addEventListener("click", () => send(example.prompt));
    $("examples").append(button);
  }
}

function sendPrompt() {
  if (running) {
    running.abort();
    return;
  }
  const text = $("prompt").value;
  $("prompt").value = "";
  send(text);
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  sendPrompt();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !running) {
    event.preventDefault();
    sendPrompt();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("new").addEventListener("click", startOver);
$("ink").addEventListener("change", () => document.body.classList.toggle("plain", !$("ink").checked));
$("n_max").addEventListener("input", showLimit);
for (const id of KEPT) {
  const kept = localStorage.getItem(id);
  if (kept !== null) $(id).value = kept;
  $(id).addEventListener("change", () => localStorage.setItem(id, $(id).value));
}
$("key").addEventListener("change", async () => {
  $("status").textContent = STATUS.ok;
  $("status").dataset.state = "ok";
  await readProps();
});
showLegend($("legend"), ["target"]);
showLimit();
showExamples();
watch();
