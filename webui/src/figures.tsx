// The figures below a reply.

import { Swatch } from "./legend";
import type { Reply } from "./reply";
import { tintOf } from "./sources";
import { grouped, percent } from "./tally";

// How much of the answer each source wrote.
export function Bar({ reply }: { reply: Reply }) {
  const counts = [...reply.trail.counts()].filter(([, n]) => n);
  const words = counts.map(([source, n]) => `${source} ${percent(n / reply.trail.n)}`).join(", ");
  return (
    <div class="bar" role="img" aria-label={`Who wrote the tokens: ${words}`}>
      {counts.map(([source, n]) => (
        <i key={source} data-source={tintOf(source)} style={{ flexGrow: n }} title={`${source}: ${n}`} />
      ))}
    </div>
  );
}

export function Shares({ reply }: { reply: Reply }) {
  const counts = [...reply.trail.counts()].filter(([, n]) => n);
  return (
    <ul class="shares">
      {counts.map(([source, n]) => (
        <li key={source}>
          <Swatch source={source} /> {source} <span class="muted">{percent(n / reply.trail.n)}</span>
        </li>
      ))}
    </ul>
  );
}

function soFar(reply: Reply): string | null {
  const seconds = (reply.lastAt - reply.startedAt) / 1000;
  const n = reply.trail.n - reply.nBefore;
  if (seconds < 0.2 || n < 2) return null;
  return `${grouped(reply.trail.n)} tokens · ${((n - 1) / seconds).toFixed(1)} tokens/s`;
}

export function figuresOf(reply: Reply): [text: string, meaning?: string][] {
  const { end } = reply;
  const told: [string, string?][] = [];
  if (end) {
    const { timings, speculation } = end;
    // Of a part that was stopped the server told no figures.
    told.push([`${grouped(Math.max(timings.predicted_n, reply.trail.n))} tokens`]);
    told.push([`${timings.predicted_per_second.toFixed(1)} tokens/s`, "generated per second, prompt not counted"]);
    if (timings.prompt_n) {
      const cached = timings.cache_n ? `, ${grouped(timings.cache_n)} more from the cache` : "";
      told.push([
        `prompt ${timings.prompt_per_second.toFixed(0)} tokens/s`,
        `${grouped(timings.prompt_n)} tokens of the prompt computed${cached}`,
      ]);
    }
    if (speculation?.num_draft_tokens) {
      const { draft_acceptance_rate: rate, num_draft_tokens: n, mean_acceptance_length: length } = speculation;
      told.push([`${percent(rate)} of ${grouped(n)} drafts accepted`, "accepted ÷ drafted tokens"]);
      told.push([`${length.toFixed(2)} tokens per pass`, "of the target, in the mean"]);
    } else {
      told.push(["nothing drafted"]);
    }
    if (end.seed !== null) told.push([`seed ${end.seed}`]);
  }
  if (reply.reason === "length") told.push(["cut at the limit"]);
  if (reply.state.value === "stopped") told.push(["stopped"]);
  return told;
}

export function Figures({ reply }: { reply: Reply }) {
  const isWriting = reply.state.value === "writing";
  reply.tick.value;
  const running = isWriting ? soFar(reply) : null;
  const told = isWriting ? [] : figuresOf(reply);
  return (
    <p class="figures">
      {running}
      {told.map(([text, meaning]) => (
        <span key={text} title={meaning}>
          {text}
        </span>
      ))}
    </p>
  );
}
