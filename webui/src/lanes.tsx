// The view *Lanes*: what every slot is doing. Of other keys' requests only that there is one.

import { useRef } from "preact/hooks";
import { Swatch } from "./legend";
import { usePolled } from "./polled";
import { grouped, percent } from "./tally";
import type { Props, Slot } from "./wire";

const SLOTS_MS = 600;
const PROPS_MS = 2000;
const STEPS = 64;

// Of a counter that is read now and then: how much it rises in a second.
function useRate(n: number | undefined, at: number): number | null {
  const last = useRef<{ n: number; at: number; rate: number | null }>({ n: 0, at: 0, rate: null });
  const was = last.current;
  if (n === undefined || at === was.at) return was.rate;
  const rate = was.at && n >= was.n ? (1000 * (n - was.n)) / (at - was.at) : null;
  last.current = { n, at, rate };
  return rate;
}

export function Lanes() {
  const slots = usePolled<Slot[]>("slots", SLOTS_MS);
  const props = usePolled<Props>("props", PROPS_MS);
  const failure = slots.failure.value;
  const rows = slots.value.value ?? [];
  const busy = rows.filter((one) => one.is_processing).length;
  return (
    <main id="lanes" class="wide">
      <h2 class="title">Lanes</h2>
      <p class="muted">
        One row for each slot: what its request has of the context, and what its last {STEPS} steps drafted and kept.
      </p>
      {failure && <p class="error">{failure.said ?? failure.sentence}</p>}
      <Totals props={props.value.value} at={props.at.value} busy={busy} slots={rows.length} />
      <ul class="lanes">
        {rows.map((slot) => (
          <Lane key={slot.id} slot={slot} at={slots.at.value} />
        ))}
      </ul>
    </main>
  );
}

function Totals({ props, at, busy, slots }: { props: Props | null; at: number; busy: number; slots: number }) {
  const rate = useRate(props?.engine.n_completion_tokens, at);
  if (!props) return null;
  const { n_waiting, n_pages_free, n_pages_cached, n_pages_held } = props.engine;
  const pages = n_pages_free + n_pages_cached + n_pages_held;
  const told: [string, string, string][] = [
    ["busy slots", `${busy} of ${slots}`, "slots that serve a request"],
    ["waiting", `${n_waiting}`, "requests without a slot"],
    ["tokens/s", rate === null ? "–" : rate.toFixed(1), "written for all requests, over the last two seconds"],
    [
      "cache",
      pages ? percent((n_pages_held + n_pages_cached) / pages) : "–",
      `${grouped(n_pages_held)} pages in use, ${grouped(n_pages_cached)} kept for later, ${grouped(n_pages_free)} free`,
    ],
  ];
  return (
    <dl class="totals">
      {told.map(([name, value, meaning]) => (
        <div key={name} title={meaning}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

function stateOf(slot: Slot): string {
  if (!slot.is_processing) return "idle";
  if (slot.id_task === null) return "another key’s request";
  return slot.next_token[0]?.n_decoded ? "writing" : "reading the prompt";
}

function Lane({ slot, at }: { slot: Slot; at: number }) {
  const decoded = slot.next_token[0]?.n_decoded ?? 0;
  const rate = useRate(slot.id_task === null ? undefined : decoded, at);
  const isMine = slot.is_processing && slot.id_task !== null;
  return (
    <li class={isMine ? "lane" : "lane quiet"} aria-label={`Slot ${slot.id}`}>
      <p class="head">
        <strong>{slot.id}</strong> {stateOf(slot)}
        {isMine && decoded > 0 && rate !== null && <span class="muted"> {rate.toFixed(1)} tokens/s</span>}
      </p>
      {isMine && (
        <>
          <Filled slot={slot} decoded={decoded} />
          <Strip recent={slot.recent ?? []} nMax={slot.n_max ?? 0} drafter={drafterOf(slot)} />
        </>
      )}
    </li>
  );
}

// Who drafts; where the server does not say, who has drafted most.
function drafterOf(slot: Slot): string | null {
  if (slot.drafter !== undefined) return slot.drafter;
  const most = Object.entries(slot.drafters).sort(([, a], [, b]) => b.draft_n - a.draft_n)[0];
  return most?.[1].draft_n ? most[0] : null;
}

function Filled({ slot, decoded }: { slot: Slot; decoded: number }) {
  const { n_ctx, n_prompt_tokens_cache: cached, n_prompt_tokens_processed: read, n_prompt_tokens: prompt } = slot;
  const parts: [string, number, string][] = [
    ["cached", cached, `${grouped(cached)} cached`],
    ["read", read, `${grouped(read)} of ${grouped(prompt - cached)} read`],
    ["decoded", decoded, `${grouped(decoded)} written`],
  ];
  return (
    <div class="filled">
      <div class="track" aria-hidden="true">
        {parts.map(([name, n]) => (
          <i key={name} class={name} style={{ width: `${(100 * n) / n_ctx}%` }} />
        ))}
      </div>
      <p class="note">
        {parts.map(([name, , text]) => (
          <span key={name}>
            <i class={`key ${name}`} aria-hidden="true" /> {text}
          </span>
        ))}
        <span>of {grouped(n_ctx)}</span>
      </p>
    </div>
  );
}

interface StripProps {
  recent: [number, number][];
  nMax: number;
  drafter: string | null;
}

// A column for each step: its height is what was drafted, the full part what was kept.
function Strip({ recent, nMax, drafter }: StripProps) {
  const drafted = recent.reduce((sum, [n]) => sum + n, 0);
  const kept = recent.reduce((sum, [, n]) => sum + n, 0);
  const most = Math.max(4, nMax, ...recent.map(([n]) => n));
  const label = `Of the last ${recent.length} steps: ${drafted} drafted, ${kept} kept`;
  return (
    <div class="strip">
      <p class="note">
        {drafter ? (
          <>
            <Swatch source={drafter} /> {drafter}
          </>
        ) : nMax === 0 && recent.length > 0 ? (
          "plain"
        ) : (
          "nothing drafted yet"
        )}
        {drafted > 0 && ` · ${percent(kept / drafted)} of ${drafted} kept`}
      </p>
      {recent.length > 0 && (
        <svg viewBox={`0 0 ${STEPS * 4} 40`} preserveAspectRatio="none" role="img" aria-label={label}>
          {recent.map(([n, accepted], i) => {
            const x = (STEPS - recent.length + i) * 4;
            const height = (value: number) => (38 * value) / most;
            return (
              <g key={i}>
                <rect class="base" x={x} y={39} width={3} height={1} />
                <rect class="drafted" x={x} y={39 - height(n)} width={3} height={height(n)} />
                <rect class="kept" x={x} y={39 - height(accepted)} width={3} height={height(accepted)} />
              </g>
            );
          })}
        </svg>
      )}
    </div>
  );
}
