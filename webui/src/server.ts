// The server's state and properties, kept fresh.

import { signal } from "@preact/signals";
import { Failure } from "./failure";
import { health, read } from "./transport";
import type { Props } from "./wire";

const POLL_MS = 1000;
const POLL_READY_MS = 10000;

export const state = signal("connecting"); // as `/health` has it, or "no-key"
export const trouble = signal<string | null>(null); // why there are no properties
export const props = signal<Props | null>(null);
export const isReady = signal(false);

const WORDS: Record<string, string> = {
  connecting: "connecting…",
  ok: "ready",
  loading: "loading the model…",
  draining: "stopping",
  failed: "failed; see its log",
  unreachable: "no connection",
};

export function inWords(): string {
  return trouble.value ?? WORDS[state.value] ?? state.value;
}

let nReads = 0;

// Of answers that overtake each other only that to the last request counts: an earlier one may be of an earlier key.
export async function readProps(): Promise<void> {
  const mine = ++nReads;
  try {
    const got = await read<Props>("props");
    if (mine !== nReads) return;
    props.value = got;
    trouble.value = null;
  } catch (error) {
    if (mine !== nReads) return;
    const failure = error as Failure;
    trouble.value = failure.status === 401 ? "needs an API key" : failure.sentence;
  }
}

export async function watch(): Promise<void> {
  state.value = await health();
  const was = isReady.value;
  isReady.value = state.value === "ok";
  if (isReady.value && (!was || !props.value) && trouble.value !== "needs an API key") await readProps();
  setTimeout(watch, isReady.value ? POLL_READY_MS : POLL_MS);
}

const OPENAI: Record<string, number> = { temperature: 1, top_p: 1, top_k: 0, min_p: 0 };

// What holds for a field that is left empty.
export function defaultOf(name: string): string {
  const told = props.value;
  if (!told) return "";
  if (name === "n_max") return told.speculation.drafters.length ? `${told.speculation.n_max}` : "0";
  if (name === "p_min") return `${told.settings.draft_p_min ?? 0}`;
  if (name === "seed") return "random";
  const params = told.default_generation_settings.params;
  if (name === "max_tokens") {
    const limit = params.n_predict ?? -1;
    return limit < 0 ? "no limit" : `${limit}`;
  }
  return `${params[name] ?? OPENAI[name] ?? ""}`;
}
