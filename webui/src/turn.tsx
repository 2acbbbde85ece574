// A question and an answer as they stand in the conversation.

import { type Signal, useSignal } from "@preact/signals";
import { Body } from "./body";
import { copied } from "./clipboard";
import { type Answer, contentOf, isEmpty, type Node, type Question } from "./conversation";
import { Bar, Figures } from "./figures";
import { Pay } from "./pay";
import { Thumbnails, Unkept } from "./thumbnails";
import type { Reply } from "./reply";
import { chooseBranch, conversation, goOn, isWriting, regenerate, send } from "./sending";
import { isReady } from "./server";
import { tinted } from "./settings";
import { grouped } from "./tally";
import { Tokens } from "./tokens";

function Branches({ node }: { node: Node }) {
  const siblings = conversation.value.siblings(node);
  if (siblings.length < 2) return null;
  const place = siblings.indexOf(node);
  return (
    <span class="branches" role="group" aria-label="Versions">
      <button type="button" class="plain" disabled={place === 0} onClick={() => chooseBranch(node, -1)} aria-label="Earlier version">
        ‹
      </button>
      <span>
        {place + 1} / {siblings.length}
      </span>
      <button
        type="button"
        class="plain"
        disabled={place === siblings.length - 1}
        onClick={() => chooseBranch(node, 1)}
        aria-label="Later version"
      >
        ›
      </button>
    </span>
  );
}

function Files({ question }: { question: Question }) {
  return (
    <>
      {question.files.map((file) => (
        <details class="file" key={file.name}>
          <summary>
            {file.name} <span class="muted">{grouped(file.text.length)} characters</span>
          </summary>
          <pre tabIndex={0}>{file.text}</pre>
        </details>
      ))}
    </>
  );
}

export function QuestionTurn({ node, isSent }: { node: Question; isSent: boolean }) {
  const editing = useSignal<string | null>(null);
  if (editing.value !== null) return <Edited node={node} text={editing} />;
  return (
    <article class="question" aria-label="Your message">
      <Thumbnails pictures={node.pictures ?? []} />
      <Unkept pictures={node.pictures ?? []} />
      <Files question={node} />
      {node.text && <pre>{node.text}</pre>}
      {isSent && (
        <div class="actions">
          <Branches node={node} />
          <button type="button" class="plain" onClick={(event) => copied(contentOf(node), event.currentTarget)}>
            Copy
          </button>
          <button type="button" class="plain edit" disabled={isWriting()} onClick={() => (editing.value = node.text)}>
            Edit
          </button>
        </div>
      )}
    </article>
  );
}

function Edited({ node, text }: { node: Question; text: { value: string | null } }) {
  // What is sent while a reply is written would be neither sent nor here any more.
  const canSend = isReady.value && !isWriting() && !isEmpty({ ...node, text: text.value ?? "" });
  const done = (event: Event) => {
    event.preventDefault();
    if (!canSend) return;
    const changed = text.value ?? "";
    text.value = null;
    send({ ...node, text: changed }, node.parent);
  };
  return (
    <form class="question editing" onSubmit={done} aria-label="Edit your message">
      <Thumbnails pictures={node.pictures ?? []} />
      <textarea
        rows={Math.min(16, (text.value ?? "").split("\n").length + 1)}
        value={text.value ?? ""}
        aria-label="Message"
        ref={(field) => field?.focus()}
        onInput={(event) => (text.value = event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key !== "Escape") return;
          event.stopPropagation(); // it would stop a reply, too
          text.value = null;
        }}
      />
      <div class="actions">
        <button type="button" class="quiet" onClick={() => (text.value = null)}>
          Cancel
        </button>
        <button type="submit" disabled={!canSend}>
          Send
        </button>
      </div>
    </form>
  );
}

function Thinking({ reply }: { reply: Reply }) {
  reply.tick.value;
  if (!reply.thinking) return null;
  const isThinking = reply.state.value === "writing" && !reply.text && !reply.calls.length;
  return (
    <details class="thinking">
      <summary>{isThinking ? "Thinking…" : `Thought, ${grouped(reply.thinking.length)} characters`}</summary>
      <Body reply={reply} part="thinking" markdown={false} />
    </details>
  );
}

function Calls({ reply }: { reply: Reply }) {
  reply.tick.value;
  return (
    <>
      {reply.calls.map((call, i) => (
        <figure class="call code" key={i}>
          <figcaption>
            <span>
              Calls <strong>{call.name}</strong>
            </span>
            <button type="button" class="plain" onClick={(event) => copied(call.given, event.currentTarget)}>
              Copy
            </button>
          </figcaption>
          <pre tabIndex={0}>
            <code>{laidOut(call.given)}</code>
          </pre>
        </figure>
      ))}
    </>
  );
}

function laidOut(json: string): string {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // still being written
  }
}

// `answer` is missing while the reply is written and after it has failed.
export function AnswerTurn({ reply, answer }: { reply: Reply; answer: Answer | null }) {
  const state = reply.state.value;
  const isOver = state !== "writing";
  const asTokens = useSignal(false);
  const hasPay = useSignal(false);
  return (
    <article
      class={`answer ${state}${tinted.value === "yes" ? "" : " untinted"}`}
      aria-label="Answer"
      aria-busy={!isOver}
    >
      {asTokens.value ? (
        <Tokens reply={reply} />
      ) : (
        <>
          <Thinking reply={reply} />
          <Body key={reply.nParts} reply={reply} part="text" markdown />
          <Calls reply={reply} />
        </>
      )}
      {isOver && reply.trail.n > 0 && <Bar reply={reply} />}
      <Figures reply={reply} />
      {state === "failed" && <p class="note">This reply failed and is not part of the conversation.</p>}
      <div class="actions">
        <Views asTokens={asTokens} />
        {answer && isOver && <Actions answer={answer} hasPay={hasPay} />}
      </div>
      {answer && isOver && hasPay.value && <Pay answer={answer} />}
    </article>
  );
}

function Views({ asTokens }: { asTokens: Signal<boolean> }) {
  const choice = (tokens: boolean, label: string) => (
    <button
      type="button"
      class="plain"
      aria-pressed={asTokens.value === tokens}
      onClick={() => (asTokens.value = tokens)}
    >
      {label}
    </button>
  );
  return (
    <span class="views" role="group" aria-label="Shown as">
      {choice(false, "Text")}
      {choice(true, "Tokens")}
    </span>
  );
}

function Actions({ answer, hasPay }: { answer: Answer; hasPay: Signal<boolean> }) {
  const { reply } = answer;
  const busy = isWriting();
  const isCut = reply.reason === "length" || reply.state.value === "stopped";
  const canGoOn = isCut && !reply.calls.length; // only text goes on: behind it the call would come once more
  return (
    <>
      <Branches node={answer} />
      <button type="button" class="plain copy" onClick={(event) => copied(reply.text, event.currentTarget)}>
        Copy
      </button>
      <button type="button" class="plain" disabled={busy} onClick={() => regenerate(answer)}>
        Regenerate
      </button>
      {canGoOn && conversation.value.leaf === answer.id && (
        <button type="button" class="plain" disabled={busy} onClick={() => goOn(answer)}>
          Continue
        </button>
      )}
      <button
        type="button"
        class="plain"
        aria-expanded={hasPay.value}
        onClick={() => (hasPay.value = !hasPay.value)}
      >
        Did it pay?
      </button>
    </>
  );
}
