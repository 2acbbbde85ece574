// The server as this page uses it: health, properties, and a chat as an async generator of chunks.

function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

// The server's own words for an error, with the status on it.
async function failure(response) {
  const body = await response.json().catch(() => ({}));
  const error = new Error(body.error?.message ?? `the server answered ${response.status}`);
  error.status = response.status;
  return error;
}

// "ok", "loading", "draining", "failed", or "unreachable".
export async function health() {
  try {
    const response = await fetch("health", { cache: "no-store" });
    return (await response.json()).status;
  } catch {
    return "unreachable";
  }
}

export async function props(key) {
  const response = await fetch("props", { headers: headers(key) });
  if (!response.ok) throw await failure(response);
  return response.json();
}

export async function* chat(body, key, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers(key) },
    body: JSON.stringify({ ...body, stream: true, spec_detail: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await failure(response);
  for await (const data of events(response.body.pipeThrough(new TextDecoderStream()))) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    yield chunk;
  }
  throw new Error("the connection ended early");
}

// The data of each server-sent event; comments, which keep the connection alive, are skipped.
async function* events(stream) {
  const reader = stream.getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ")) yield part.slice(6);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
