// The conversation, or a welcome where there is none.

import { useSignal } from "@preact/signals";
import { attach } from "./attaching";
import { Composer } from "./composer";
import { EXAMPLES } from "./examples";
import { attempt, conversation, isWriting, send } from "./sending";
import { isReady, props } from "./server";
import { AnswerTurn, QuestionTurn } from "./turn";

export function Chat() {
  const isAbove = useSignal(false); // files that are dragged
  const now = conversation.value;
  now.version.value;
  const trying = attempt.value?.conversation === now ? attempt.value : null;
  // What is made again, or sent again from an earlier place, hides what stood there.
  const path = now.path(trying && !trying.continues ? trying.parent : now.leaf);
  const isEmpty = !path.length && !trying;
  // One list with the keys that the nodes will have, so that what was written stays on the page when it is finished.
  const shown = path.map((node) =>
    node.kind === "question" ? (
      <QuestionTurn key={node.id} node={node} isSent />
    ) : (
      <AnswerTurn key={node.id} reply={node.reply} answer={node} />
    ),
  );
  if (trying?.question) shown.push(<QuestionTurn key={trying.question.id} node={trying.question} isSent={false} />);
  if (trying && !trying.continues) shown.push(<AnswerTurn key={trying.id} reply={trying.reply} answer={null} />);
  return (
    <main
      id="chat"
      class={`${isEmpty ? "empty" : ""} ${isAbove.value ? "above" : ""}`}
      onDragOver={(event) => {
        if (!event.dataTransfer?.types.includes("Files")) return;
        event.preventDefault();
        isAbove.value = true;
      }}
      onDragLeave={(event) => {
        if (!event.currentTarget.contains(event.relatedTarget as Element | null)) isAbove.value = false;
      }}
      onDrop={(event) => {
        isAbove.value = false;
        if (!event.dataTransfer?.files.length) return;
        event.preventDefault();
        void attach([...event.dataTransfer.files]);
      }}
    >
      <section id="conversation" aria-label="Conversation">
        {shown}
      </section>
      {isEmpty && <Welcome />}
      <Composer />
    </main>
  );
}

function isDemo(): boolean {
  const told = props.value;
  return !!told && (/(^|\/)demo\//.test(told.model_path) || told.model_alias === "demo");
}

function Welcome() {
  return (
    <section id="welcome">
      <h2>Every token is the target model’s own.</h2>
      <p>
        Drafters guess ahead, the target checks all guesses in one pass and keeps those it would have written itself. The
        text stays the same; it only comes sooner. Tinted tokens were guessed, and the tint says by whom.
      </p>
      {isDemo() && (
        <p class="demo">
          This is the demo model, with 5 million parameters. It renames a variable in Python code, continues code, and writes a
          docstring; about anything else it talks nonsense.
        </p>
      )}
      <div id="examples">
        {EXAMPLES.map(({ title, note, prompt }) => (
          <button
            key={title}
            type="button"
            disabled={!isReady.value || isWriting()}
            onClick={() => send({ text: prompt, files: [] })}
          >
            <strong>{title}</strong>
            <span>{note}</span>
          </button>
        ))}
      </div>
    </section>
  );
}
