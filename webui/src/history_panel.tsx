// The list of kept conversations.

import { useSignal, useSignalEffect } from "@preact/signals";
import { useRef } from "preact/hooks";
import { entries, exported, imported, isKept, remove, removeAll, search } from "./history";
import { conversation, forgetConversation, startOver } from "./sending";

function download(file: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(file);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export function HistoryPanel({ chosen }: { chosen: () => void }) {
  const words = useSignal("");
  const found = useSignal<Set<string> | null>(null);
  const told = useSignal("");
  const picker = useRef<HTMLInputElement>(null);
  useSignalEffect(() => {
    const wanted = words.value;
    entries.value;
    if (!wanted.trim()) found.value = null;
    else void search(wanted).then((ids) => words.peek() === wanted && (found.value = ids));
  });
  const shown = entries.value.filter((one) => found.value?.has(one.id) ?? true);
  const bring = async (file: File | undefined) => {
    if (!file) return;
    try {
      const n = await imported(await file.text());
      told.value = n === 1 ? "1 conversation imported." : `${n} conversations imported.`;
    } catch (error) {
      told.value = (error as Error).message;
    }
  };
  return (
    <>
      <button
        id="new"
        type="button"
        class="quiet"
        onClick={() => {
          startOver();
          chosen();
        }}
      >
        New chat
      </button>
      <input
        id="search"
        type="search"
        placeholder="Search chats"
        aria-label="Search chats"
        value={words.value}
        onInput={(event) => (words.value = event.currentTarget.value)}
      />
      {!isKept.value && <p class="note">This browser keeps no chats: its database is closed to the page.</p>}
      <ul id="chats">
        {shown.map((one) => (
          <li key={one.id} class={one.id === conversation.value.id ? "current" : ""}>
            <a
              href={`#/chat/${one.id}`}
              aria-current={one.id === conversation.value.id ? "page" : undefined}
              onClick={chosen}
            >
              {one.title || "Untitled"}
            </a>
            <button
              type="button"
              class="plain"
              aria-label={`Delete ${one.title}`}
              onClick={() => {
                if (one.id === conversation.value.id) forgetConversation();
                void remove(one.id);
              }}
            >
              ×
            </button>
          </li>
        ))}
      </ul>
      {found.value && !shown.length && <p class="note">No chat has these words.</p>}
      <div class="foot">
        <button
          id="export"
          type="button"
          class="plain"
          disabled={!entries.value.length}
          onClick={async () => download(await exported(), "slipstream-chats.json")}
        >
          Export
        </button>
        <button id="import" type="button" class="plain" onClick={() => picker.current?.click()}>
          Import
        </button>
        <DeleteAll />
        <input
          ref={picker}
          id="import-file"
          type="file"
          accept="application/json,.json"
          hidden
          onChange={(event) => {
            void bring(event.currentTarget.files?.[0]);
            event.currentTarget.value = "";
          }}
        />
      </div>
      <p class="note" role="status">
        {told.value}
      </p>
    </>
  );
}

// Asks once more by its own label.
function DeleteAll() {
  const isSure = useSignal(false);
  const press = () => {
    if (isSure.value) {
      forgetConversation();
      void removeAll();
    }
    isSure.value = !isSure.value;
  };
  return (
    <button
      id="delete-all"
      type="button"
      class="plain"
      disabled={!entries.value.length}
      onClick={press}
      onBlur={() => (isSure.value = false)}
    >
      {isSure.value ? "Really delete all?" : "Delete all"}
    </button>
  );
}
