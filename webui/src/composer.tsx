// Where messages are written: the text, attached files, and what went wrong with the last one.

import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { attach, refused, settled, seesImages } from "./attaching";
import { isEmpty } from "./conversation";
import { toEnd } from "./follow";
import { TYPES } from "./picture";
import { Thumbnails } from "./thumbnails";
import {
  attempt,
  conversation,
  dismiss,
  draft,
  drafted,
  draftFiles,
  draftPictures,
  isWriting,
  retry,
  send,
  stop,
  takeDraft,
} from "./sending";
import { isReady, props } from "./server";
import { grouped } from "./tally";

async function submit(): Promise<void> {
  if (isWriting()) {
    stop();
    return;
  }
  const into = conversation.value;
  refused.value = "";
  await settled(); // a file that is still being read belongs to this message
  // Where it was refused, or something else was begun meanwhile, the message stays here.
  if (refused.value || isWriting() || into !== conversation.value) return;
  if (!isReady.value || isEmpty(drafted())) return;
  send(takeDraft());
  requestAnimationFrame(toEnd);
}

const AIMED_MS = 300; // in which a hand that aimed at Stop cannot help a click

export function Composer() {
  const field = useRef<HTMLTextAreaElement>(null);
  useEffect(() => {
    if (isReady.value && !document.activeElement?.matches("input, textarea, select")) {
      field.current?.focus({ preventScroll: true });
    }
  }, [isReady.value, conversation.value]);
  useEffect(() => {
    document.addEventListener("paste", paste);
    return () => document.removeEventListener("paste", paste);
  }, []);
  const press = (event: KeyboardEvent) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || isWriting()) return;
    event.preventDefault();
    void submit();
  };
  const writing = isWriting();
  const pressedStop = useRef(false); // as the pointer went down on the button
  const stopUntil = useRef(0); // when the button last ceased to be Stop, and a little longer
  useLayoutEffect(() => {
    if (!writing) return;
    return () => {
      stopUntil.current = performance.now() + AIMED_MS;
    };
  }, [writing]);
  return (
    <form
      id="composer"
      onSubmit={(event) => {
        event.preventDefault();
        void submit();
      }}
    >
      <Trouble />
      {refused.value && (
        <p class="error" role="alert">
          {refused.value}
        </p>
      )}
      <Thumbnails
        pictures={draftPictures.value}
        remove={(picture) => {
          draftPictures.value = draftPictures.value.filter((one) => one !== picture);
          field.current?.focus();
        }}
      />
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
      <div class="actions">
        <Picker id="files" label="Attach" />
        {seesImages() && <Picker id="images" label="Add images" types={TYPES} />}
        <Gauge />
        <span id="hint">Enter sends</span>
        <button
          id="send"
          type="submit"
          class={writing ? "stop" : ""}
          disabled={!isReady.value && !writing}
          onPointerDown={() => (pressedStop.current = isWriting() || performance.now() < stopUntil.current)}
          onClick={(event) => {
            // The reply has ended under the pointer, or just before; a click by a key has no detail.
            if (event.detail && pressedStop.current && !isWriting()) event.preventDefault();
          }}
        >
          {writing ? "Stop" : "Send"}
        </button>
      </div>
    </form>
  );
}

function Picker({ id, label, types }: { id: string; label: string; types?: string }) {
  const picker = useRef<HTMLInputElement>(null);
  return (
    <>
      <button type="button" class="quiet" disabled={!isReady.value} onClick={() => picker.current?.click()}>
        {label}
      </button>
      <input
        ref={picker}
        id={id}
        type="file"
        accept={types}
        multiple
        hidden
        onChange={(event) => {
          void attach([...(event.currentTarget.files ?? [])]);
          event.currentTarget.value = "";
        }}
      />
    </>
  );
}

// What has a text is pasted as text: office programs put a picture of it beside.
function paste(event: ClipboardEvent): void {
  const given = event.clipboardData;
  if (!given?.files.length || given.types.includes("text/plain")) return;
  event.preventDefault();
  void attach([...given.files]);
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
