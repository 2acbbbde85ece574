// The frame: views, the list of conversations on the left, settings on the right.

import { effect, signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { Chat } from "./chat";
import { Costs } from "./costs";
import { HistoryPanel } from "./history_panel";
import { Inspector, lookAway } from "./inspect";
import { Lanes } from "./lanes";
import { Enlarged } from "./thumbnails";
import { Race } from "./race_view";
import { announced, conversation, openConversation, stop } from "./sending";
import { inWords, props, state, trouble } from "./server";
import { SettingsPanel } from "./settings_panel";

const VIEWS = { chat: "Chat", race: "Race", lanes: "Lanes", costs: "Costs" } as const;
type View = keyof typeof VIEWS;

const view = signal<View>("chat");
const opened = signal<"history" | "settings" | null>(null); // of the two panels, where the window is narrow

// `#/chat/ID`, `#/race` …
function route(): void {
  const [, name, id] = location.hash.split("/");
  opened.value = null;
  view.value = name && name in VIEWS ? (name as View) : "chat";
  if (view.value === "chat" && id) void openConversation(id);
  lookAway();
}

// What is told late is what the user chose; a chat kept in the meantime may have put itself in its place.
function follow({ newURL }: HashChangeEvent): void {
  if (location.href !== newURL) history.replaceState(null, "", newURL);
  route();
}

function close(): void {
  opened.value = null;
}

function Tabs() {
  const id = conversation.value.nodes.size ? `/${conversation.value.id}` : "";
  return (
    <nav aria-label="Views">
      {Object.entries(VIEWS).map(([name, label]) => (
        <a
          key={name}
          href={`#/${name}${name === "chat" ? id : ""}`}
          aria-current={view.value === name ? "page" : undefined}
        >
          {label}
        </a>
      ))}
    </nav>
  );
}

function Toggle({ panel, label, sign }: { panel: "history" | "settings"; label: string; sign: string }) {
  return (
    <button
      type="button"
      class="plain toggle"
      aria-label={label}
      aria-expanded={opened.value === panel}
      aria-controls={panel}
      onClick={() => (opened.value = opened.value === panel ? null : panel)}
    >
      {sign}
    </button>
  );
}

export function App() {
  useEffect(() => {
    route();
    addEventListener("hashchange", follow);
    const keys = (event: KeyboardEvent) => {
      if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
      if (opened.value) close();
      else if (document.querySelector(".inspector.shown")) lookAway();
      else stop();
    };
    document.addEventListener("keydown", keys);
    return () => {
      removeEventListener("hashchange", follow);
      document.removeEventListener("keydown", keys);
    };
  }, []);
  const isChat = view.value === "chat";
  const status = trouble.value ? "failed" : state.value;
  return (
    <>
      <header>
        {isChat && <Toggle panel="history" label="Chats" sign="☰" />}
        <h1>
          <img src="favicon.svg" alt="" width="24" height="24" />
          <span>Slipstream</span>
        </h1>
        <Tabs />
        <p id="model">{props.value?.model_alias}</p>
        <p id="status" data-state={status} role="status">
          {inWords()}
        </p>
        {isChat && <Toggle panel="settings" label="Settings" sign="⚙" />}
      </header>
      <div id="columns" class={view.value}>
        {isChat && (
          <aside id="history" class={opened.value === "history" ? "open" : ""} aria-label="Chats">
            <HistoryPanel chosen={close} />
          </aside>
        )}
        {isChat && <Chat />}
        {view.value === "race" && <Race />}
        {view.value === "lanes" && <Lanes />}
        {view.value === "costs" && <Costs />}
        {isChat && (
          <aside id="settings" class={opened.value === "settings" ? "open" : ""} aria-label="Settings">
            <SettingsPanel />
          </aside>
        )}
        {opened.value && <div class="veil" onClick={close} />}
      </div>
      <Inspector />
      <Enlarged />
      <div class="hidden" aria-live="polite">
        {announced.value}
      </div>
    </>
  );
}

effect(() => {
  const { title, version } = conversation.value;
  version.value;
  document.title = title ? `${title} – Slipstream` : "Slipstream";
});

