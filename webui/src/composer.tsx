// Where messages are written: the text, attached files, and what went wrong with the last one.

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import type { File as Attached } from "./conversation";
import { toEnd } from "./follow";
import { attempt, clearDraft, conversation, dismiss, draft, draftFiles, isWriting, retry, send, stop } from "./sending";
import { isReady, props } from "./server";
import { grouped } from "./tally";

const MOST_BYTES = 4 << 20;

async function textOf(file: File): Promise<Attached | string> {
  if (file.size > MOST_BYTES) return `${file.name} is larger than 4 MiB.`;
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return { name: file.name, text };
  } catch {
    // no UTF-8
  }
  const kind = file.type.startsWith("image/") ? "is an image, which this model does not take" : "is not a text file";
  return `${file.name} ${kind}.`;
}

function submit(): void {
  if (isWriting()) {
    stop();
    return;
  }
  if (!isReady.value) return;
  const [text, files] = [draft.value, draftFiles.value];
  if (!text.trim() && !files.length) return;
  clearDraft();
  send(text, files);
  requestAnimationFrame(toEnd);
}

export function Composer() {
  const refused = useSignal("");
  const picker = useRef<HTMLInputElement>(null);
  const field = useRef<HTMLTextAreaElement>(null);
  useEffect(() => {
    if (isReady.value && !document.activeElement?.matches("input, textarea, select")) {
      field.current?.focus({ preventScroll: true });
    }
  }, [isReady.value, conversation.value]);
  const attach = async (files: Iterable<File>) => {
    const read = await Promise.all([...files].map(textOf));
    draftFiles.value = [...draftFiles.value, ...read.filter((one) => typeof one !== "string")];
    refused.value = read.filter((one) => typeof one === "string").join(" ");
  };
  const press = (event: KeyboardEvent) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || isWriting()) return;
    event.preventDefault();
    submit();
  };
  const writing = isWriting();
  return (
    <form
      id="composer"
      onSubmit={(event) => {
        event.preventDefault();
        submit();
      }}
      onDragOver={(event) => event.preventDefault()}
      onDrop={(event) => {
        event.preventDefault();
        void attach(event.dataTransfer?.files ?? []);
      }}
    >
      <Trouble />
      {refused.value && (
        <p class="error" role="alert">
          {refused.value}
        </p>
      )}
      <Attachments />
      <textarea
        id="prompt"
        ref={field}
        rows={Math.min(12, Math.max(2, draft.value.split("\n").length))}
        placeholder="Write a message; Shift+Enter breaks the line"
        aria-label="Message"
        disabled={!isReady.value}
        value={draft.value}
        onInput={(event) => (draft.value = event.currentTarget.value)}
        onKeyDown={press}
      />
      <input
        ref={picker}
        id="files"
        type="file"
        multiple
        hidden
        onChange={(event) => {
          void attach(event.currentTarget.files ?? []);
          event.currentTarget.value = "";
        }}
      />
      <div class="actions">
        <button type="button" class="quiet" disabled={!isReady.value} onClick={() => picker.current?.click()}>
          Attach
        </button>
        <Gauge />
        <span id="hint">Enter sends</span>
        <button id="send" type="submit" class={writing ? "stop" : ""} disabled={!isReady.value && !writing}>
          {writing ? "Stop" : "Send"}
        </button>
      </div>
    </form>
  );
}

function Trouble() {
  const failure = attempt.value?.failure;
  if (!failure) return null;
  return (
    <div class="trouble" role="alert">
      <p>{failure.sentence}</p>
      {failure.said && !failure.sentence.includes(failure.said) && <p class="note">Server: {failure.said}</p>}
      {failure.requestId && (
        <p class="note">
          Request <code>{failure.requestId}</code>
        </p>
      )}
      <div class="actions">
        <button type="button" id="retry" onClick={retry} disabled={!isReady.value}>
          Retry
        </button>
        <button type="button" class="quiet" onClick={dismiss}>
          Dismiss
        </button>
      </div>
    </div>
  );
}

function Attachments() {
  if (!draftFiles.value.length) return null;
  return (
    <ul class="attachments">
      {draftFiles.value.map((file) => (
        <li key={file.name}>
          {file.name} <span class="muted">{grouped(file.text.length)} characters</span>
          <button
            type="button"
            class="plain"
            aria-label={`Remove ${file.name}`}
            onClick={() => (draftFiles.value = draftFiles.value.filter((one) => one !== file))}
          >
            ×
          </button>
        </li>
      ))}
    </ul>
  );
}

// How much of the context the conversation fills, as of its last reply.
function Gauge() {
  conversation.value.version.value;
  const size = props.value?.default_generation_settings.n_ctx;
  const last = conversation.value.path().findLast((node) => node.kind === "answer");
  const usage = last?.kind === "answer" ? last.reply.end?.usage : null;
  if (!size || !usage) return null;
  const filled = usage.prompt_tokens + usage.completion_tokens;
  return (
    <label class="gauge" title="tokens of the model’s context that the conversation fills">
      <meter min={0} max={size} high={0.85 * size} value={filled} />
      <span>
        {grouped(filled)} of {grouped(size)}
        <span class="roomy"> tokens</span>
      </span>
    </label>
  );
}
