// Requests to the server. Paths are relative, so that the page works below any prefix.

import { broken, cutOff, type Failure, refusal, unreachable } from "./failure";
import { keepText, keptText } from "./store";
import type { Chunk } from "./wire";

const SLICE_MS = 8; // of parsing at a time; then the browser may paint and hear clicks

let held = keptText("sessionStorage", "key") ?? "";

export const key = {
  get: (): string => held,
  set: (value: string): void => {
    held = value;
    keepText("sessionStorage", "key", value);
  },
};

function headers(): Record<string, string> {
  // A header's characters are bytes: here those of UTF-8, as other clients send them.
  const bytes = String.fromCharCode(...new TextEncoder().encode(key.get()));
  return bytes ? { authorization: `Bearer ${bytes}` } : {};
}

// "ok", "loading", "draining", "failed", or "unreachable".
export async function health(): Promise<string> {
  try {
    const response = await fetch("health", { cache: "no-store" });
    return (await response.json()).status;
  } catch {
    return "unreachable";
  }
}

export async function read<T>(path: string): Promise<T> {
  const response = await fetch(path, { headers: headers(), cache: "no-store" }).catch(() => {
    throw unreachable();
  });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

// The chunks of a chat's reply. Throws `Failure`, or the signal's AbortError.
export async function* chat(body: object, signal: AbortSignal): AsyncGenerator<Chunk> {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers() },
    body: JSON.stringify({ ...body, stream: true, spec_detail: true, stream_options: { include_usage: true } }),
    signal,
  }).catch((error: unknown) => {
    throw signal.aborted ? error : unreachable();
  });
  if (!response.ok) throw await refusal(response);
  const id = response.headers.get("x-request-id");
  const data = events(response.body as ReadableStream<Uint8Array>, signal, cutOff(id));
  for await (const event of data) {
    if (event === "[DONE]") return;
    const chunk = JSON.parse(event);
    if (chunk.error) throw broken(chunk.error, id);
    yield chunk;
  }
  throw cutOff(id);
}

// The data of each server-sent event; comments, which keep the connection alive, are skipped.
async function* events(body: ReadableStream<Uint8Array>, signal: AbortSignal, lost: Failure) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error: unknown) => {
        throw signal.aborted ? error : lost;
      });
      if (done) return;
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = parts.pop() ?? "";
      let since = performance.now();
      for (const part of parts) {
        if (performance.now() - since > SLICE_MS) {
          await new Promise((resolve) => setTimeout(resolve));
          signal.throwIfAborted();
          since = performance.now();
        }
        if (part.startsWith("data: ")) yield part.slice(6);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
