// What went wrong with a request, in a sentence for people.

export class Failure extends Error {
  constructor(
    readonly sentence: string,
    readonly status: number | null,
    readonly code: string | null,
    readonly requestId: string | null,
    readonly said: string | null,
  ) {
    super(sentence);
  }
}

interface ErrorBody {
  error?: { message?: string; code?: string | null; n_prompt_tokens?: number; n_ctx?: number };
}

export async function refusal(response: Response): Promise<Failure> {
  const body: ErrorBody = await response.json().catch(() => ({}));
  const code = body.error?.code ?? null;
  const wait = response.headers.get("retry-after");
  return new Failure(
    sentence(response.status, body, wait),
    response.status,
    code,
    response.headers.get("x-request-id"),
    body.error?.message ?? null,
  );
}

function sentence(status: number, body: ErrorBody, wait: string | null): string {
  const error = body.error;
  const again = wait ? ` Try again in ${wait} s.` : " Try again in a moment.";
  if (status === 401) return "The server wants an API key: enter it under Settings, then retry.";
  if (status === 429) return `The server has too many requests waiting.${again}`;
  if (status === 503) return `The server takes no requests just now.${again}`;
  if (status === 413) return "The message is too large for this server.";
  if (status >= 500) return "The server failed on this request. Its log has the cause under the request’s id.";
  if (error?.code === "context_length_exceeded") {
    const sizes = error.n_ctx ? ` (${error.n_prompt_tokens} tokens, of ${error.n_ctx})` : "";
    return `The conversation is longer than the model’s context${sizes}. Shorten it, or begin a new chat.`;
  }
  return `The server refused the request: ${error?.message ?? `status ${status}`}`;
}

// An error that came as an event, after the reply had begun.
export function broken(error: NonNullable<ErrorBody["error"]>, requestId: string | null): Failure {
  const told = "The server failed while it wrote the reply.";
  return new Failure(told, null, error.code ?? null, requestId, error.message ?? null);
}

export function cutOff(requestId: string | null): Failure {
  const told = "The connection ended before the reply did.";
  return new Failure(told, null, "cut_off", requestId, null);
}

export function unreachable(): Failure {
  const told = navigator.onLine ? "The server cannot be reached. Is it running?" : "This computer is offline.";
  return new Failure(told, null, "unreachable", null, null);
}
