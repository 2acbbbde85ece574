// A race: one prompt in two to four lanes that differ in how they speculate, with one seed, so that the texts are equal.

import { signal } from "@preact/signals";
import { EXAMPLES } from "./examples";
import type { Failure } from "./failure";
import { Reply } from "./reply";
import { type Asked, SAMPLING, fields } from "./settings";
import { chat, key } from "./transport";

export interface Lane {
  id: number;
  types: string[]; // none chosen: all that are loaded
  nMax: string;
  pMin: string;
}

export interface Run {
  lane: Lane;
  reply: Reply | null; // null: its turn has not come
  failure: Failure | null;
}

export const MOST_LANES = 4;
export const prompt = signal(EXAMPLES[0]?.prompt ?? "");
export const together = signal(false);
export const seed = signal("");
export const maxTokens = signal("");
export const lanes = signal<Lane[]>([
  { id: 1, types: [], nMax: "", pMin: "" },
  { id: 2, types: [], nMax: "0", pMin: "" },
]);
export const runs = signal<Run[]>([]);
export const isRacing = signal(false);
export const raced = signal<{ seed: number; prompt: string } | null>(null);
let control: AbortController | null = null;

export function addLane(): void {
  const id = Math.max(0, ...lanes.value.map((one) => one.id)) + 1;
  lanes.value = [...lanes.value, { id, types: [], nMax: "", pMin: "" }];
}

export function changeLane(id: number, change: Partial<Lane>): void {
  lanes.value = lanes.value.map((one) => (one.id === id ? { ...one, ...change } : one));
}

export function removeLane(id: number): void {
  lanes.value = lanes.value.filter((one) => one.id !== id);
}

export function nameOf(lane: Lane): string {
  if (lane.nMax === "0") return "plain";
  const parts = [lane.types.length ? lane.types.join(" + ") : "all drafters"];
  if (lane.nMax) parts.push(`at most ${lane.nMax}`);
  if (lane.pMin) parts.push(`p ≥ ${lane.pMin}`);
  return parts.join(", ");
}

// The fields of a lane's request. Sampling is that of the chat's settings.
export function bodyOf(lane: Lane, seed: number, text: string): Asked {
  const set = SAMPLING.filter(({ name }) => name !== "seed" && name !== "max_tokens" && fields[name]?.value.trim());
  const body: Asked = Object.fromEntries(set.map(({ name }) => [name, Number(fields[name]?.value)]));
  if (maxTokens.value.trim()) body.max_tokens = Number(maxTokens.value);
  const speculative: Asked = {};
  if (lane.types.length) speculative.types = lane.types;
  if (lane.nMax.trim()) speculative.n_max = Number(lane.nMax);
  if (lane.pMin.trim()) speculative.p_min = Number(lane.pMin);
  if (Object.keys(speculative).length) body.speculative = speculative;
  return { ...body, seed, messages: [{ role: "user", content: text }] };
}

export async function race(): Promise<void> {
  const drawn = crypto.getRandomValues(new Uint32Array(1))[0] as number;
  const chosen = seed.value.trim() ? Number(seed.value) : drawn;
  raced.value = { seed: chosen, prompt: prompt.value };
  runs.value = lanes.value.map((lane) => ({ lane, reply: null, failure: null }));
  isRacing.value = true;
  control = new AbortController();
  const { signal: until } = control;
  try {
    const all = runs.value.map((_, i) => () => run(i, chosen, until));
    if (together.value) await Promise.all(all.map((one) => one()));
    else for (const one of all) await one();
  } finally {
    isRacing.value = false;
  }
}

async function run(i: number, chosen: number, until: AbortSignal): Promise<void> {
  if (until.aborted) return;
  const { lane } = runs.value[i] as Run;
  const { messages, ...rest } = bodyOf(lane, chosen, (raced.value as { prompt: string }).prompt);
  const reply = new Reply(rest);
  change(i, { reply });
  try {
    for await (const chunk of chat({ ...rest, messages }, until)) reply.add(chunk);
    reply.finish("done");
  } catch (error) {
    reply.finish(until.aborted ? "stopped" : "failed");
    if (!until.aborted) change(i, { failure: error as Failure });
  }
}

function change(i: number, what: Partial<Run>): void {
  runs.value = runs.value.map((one, at) => (at === i ? { ...one, ...what } : one));
}

export function stopRace(): void {
  control?.abort();
}

function address(): string {
  return new URL("v1/chat/completions", location.href.split("#")[0]).href;
}

function bodies(): Asked[] {
  const now = raced.value;
  const [chosen, text] = now ? [now.seed, now.prompt] : [Number(seed.value || 1), prompt.value];
  const those = now ? runs.value.map((one) => one.lane) : lanes.value;
  return those.map((lane) => bodyOf(lane, chosen, text));
}

// The race as commands. Of a key only the name of a variable is in it.
export function asCurl(): string {
  const auth = key.get() ? `  -H "Authorization: Bearer $API_KEY" \\\n` : "";
  return bodies()
    .map((body) => {
      const quoted = JSON.stringify(body).replaceAll("'", `'\\''`);
      return `curl ${address()} \\\n  -H 'content-type: application/json' \\\n${auth}  -d '${quoted}'`;
    })
    .join("\n\n");
}

export function asPython(): string {
  const auth = key.get() ? `, "authorization": "Bearer " + os.environ["API_KEY"]` : "";
  const lines = bodies().map((body) => `    json.loads(${JSON.stringify(JSON.stringify(body))}),`);
  return `import json
import os
import urllib.request

LANES = [
${lines.join("\n")}
]
texts = []
for body in LANES:
    request = urllib.request.Request(
        ${JSON.stringify(address())},
        json.dumps(body).encode(),
        {"content-type": "application/json"${auth}},
    )
    with urllib.request.urlopen(request) as answer:
        reply = json.load(answer)
    timings = reply["timings"]
    texts.append(reply["choices"][0]["message"]["content"])
    print(
        body.get("speculative", "all drafters"),
        f"{timings['predicted_n']} tokens",
        f"{timings['predicted_per_second']:.1f} tokens/s",
        f"{timings.get('draft_n_accepted', 0)} of {timings.get('draft_n', 0)} drafts accepted",
    )
assert len(set(texts)) == 1, "the texts differ"
`;
}
