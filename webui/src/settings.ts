// What the user set. An empty field is not sent, so that the server's own default holds.

import { signal, type Signal } from "@preact/signals";
import { keepText, keptText } from "./store";

export interface Field {
  name: string;
  label: string;
  min: number;
  max?: number;
  step: number;
}

export const SAMPLING: Field[] = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1 },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.05 },
  { name: "top_k", label: "Top k", min: 0, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01 },
  { name: "seed", label: "Seed", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1 },
  { name: "max_tokens", label: "Most tokens", min: 1, step: 1 },
];
export const SPECULATION: Field[] = [
  { name: "n_max", label: "Most drafted tokens", min: 0, step: 1 },
  { name: "p_min", label: "Least probability", min: 0, max: 1, step: 0.05 },
];

function kept(name: string, initial = ""): Signal<string> {
  const made = signal(keptText("localStorage", name) ?? initial);
  made.subscribe((value) => keepText("localStorage", name, value === initial ? null : value));
  return made;
}

export const fields: Record<string, Signal<string>> = Object.fromEntries(
  [...SAMPLING, ...SPECULATION].map(({ name }) => [name, kept(name)]),
);
export const system = kept("system");
export const tools = kept("tools");
export const tinted = kept("tinted", "yes");

keepText("localStorage", "key", null); // earlier versions kept it here

export type Asked = Record<string, unknown>;

// Why the tools' text cannot be sent, if it cannot.
export function faultOfTools(): string | null {
  if (!tools.value.trim()) return null;
  try {
    return Array.isArray(JSON.parse(tools.value)) ? null : "a list of tools is expected: [{…}]";
  } catch (error) {
    return (error as Error).message;
  }
}

// The fields of a request beside its messages.
export function asked(): Asked {
  const body: Asked = numbers(SAMPLING);
  const speculative = numbers(SPECULATION);
  if (Object.keys(speculative).length) body.speculative = speculative;
  if (tools.value.trim() && !faultOfTools()) body.tools = JSON.parse(tools.value);
  return body;
}

function numbers(of: Field[]): Asked {
  const set = of.filter(({ name }) => fields[name]?.value.trim());
  return Object.fromEntries(set.map(({ name }) => [name, Number(fields[name]?.value)]));
}
