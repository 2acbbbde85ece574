// The view *Costs*: what a pass costs by its rows, what drafts of a length promise, and which length that makes best.

import { Swatch } from "./legend";
import { type Line, Plot } from "./plot";
import { usePolled } from "./polled";
import { grouped, percent } from "./tally";
import type { SpeculationReport } from "./wire";

const POLL_MS = 1000;
const MOST_LENGTH = 32;

export function Costs() {
  const polled = usePolled<SpeculationReport>("speculation", POLL_MS);
  const told = polled.value.value;
  const failure = polled.failure.value;
  return (
    <main id="costs" class="wide">
      <h2 class="title">Cost and benefit</h2>
      <p class="muted">
        A draft token costs a row of the target’s pass and brings a token with some probability. The length whose tokens per
        millisecond are greatest is what drafting should choose.
      </p>
      {failure && <p class="error">{failure.said ?? failure.sentence}</p>}
      {told && <Report told={told} />}
    </main>
  );
}

// The acceptance believed at each place: what is told holds up to the next place that is listed.
export function believed(places: { place: number; acceptance: number }[], n: number): number[] {
  let at = 0;
  return Array.from({ length: n }, (_, i) => {
    while ((places[at + 1]?.place ?? Infinity) <= i) at++;
    return places[at]?.acceptance ?? 0;
  });
}

// Tokens that a pass is expected to bring with drafts of 0, 1, 2 … tokens.
export function expected(acceptance: number[]): number[] {
  const tokens = [1];
  let all = 1;
  for (const one of acceptance) {
    all *= one;
    tokens.push((tokens.at(-1) as number) + all);
  }
  return tokens;
}

// A pass's milliseconds, between the numbers of rows that are known on a straight line.
export function passMs(passes: { rows: number; ms: number }[], rows: number): number {
  const sorted = [...passes].sort((a, b) => a.rows - b.rows);
  const next = sorted.findIndex((one) => one.rows >= rows);
  if (next < 0) return sorted.at(-1)?.ms ?? 0;
  const [low, high] = [sorted[Math.max(0, next - 1)], sorted[next]];
  if (!low || !high || low.rows === high.rows) return high?.ms ?? 0;
  return low.ms + ((rows - low.rows) / (high.rows - low.rows)) * (high.ms - low.ms);
}

function Report({ told }: { told: SpeculationReport }) {
  const longest = Math.min(MOST_LENGTH, Math.max(4, (told.n_lengths.length || 9) - 1));
  // Of a drafter that has not guessed yet only a prior is told.
  const names = Object.keys(told.drafters).filter((name) => told.drafters[name]?.places.some((one) => one.n_judged));
  const gains = names.map((name) => {
    const state = told.drafters[name] as SpeculationReport["drafters"][string];
    return { name, tokens: expected(believed(state.places, longest)), guessMs: state.guess_ms };
  });
  const chosen = told.lengths.reduce((best, n, i) => (n > (told.lengths[best] ?? 0) ? i : best), 0);
  const mark = told.lengths.some(Boolean) ? { x: chosen, label: "mostly chosen" } : undefined;
  const perMs: Line[] = gains.map(({ name, tokens }) => ({
    name,
    points: tokens.map((n, i): [number, number] => [i, (1000 * n) / Math.max(1e-6, passMs(told.passes, i + 1))]),
  }));
  return (
    <>
      <p class="why">
        {told.explanation
          ? `Nothing is drafted: ${told.explanation}.`
          : `${percent(told.drafted_share)} of the passes lately carry drafts.`}
      </p>
      <div class="plots">
        <figure>
          <figcaption>A pass, by its rows: as reckoned with, and, dashed, as measured last</figcaption>
          <Plot label={passesInWords(told)} lines={passLines(told)} x="rows" y="ms" />
        </figure>
        <figure>
          <figcaption>Tokens of a pass, by the draft’s length</figcaption>
          <Plot
            label={gains.map(({ name, tokens }) => `${name}: ${tokens.map((n) => n.toFixed(2)).join(", ")}`).join("; ")}
            lines={gains.map(({ name, tokens }) => ({ name, points: tokens.map((n, i): [number, number] => [i, n]) }))}
            x="draft tokens"
            y="expected tokens"
            mark={mark}
          />
        </figure>
        <figure>
          <figcaption>Tokens a second, by the draft’s length (drafters’ own time not counted)</figcaption>
          <Plot label="Expected tokens a second by length" lines={told.passes.length ? perMs : []} x="draft tokens" y="tokens/s" mark={mark} />
        </figure>
        <figure>
          <figcaption>Lengths chosen lately</figcaption>
          <Lengths lengths={told.lengths} />
        </figure>
      </div>
      <DrafterTable told={told} />
    </>
  );
}

function passLines({ passes }: SpeculationReport): Line[] {
  const sorted = [...passes].sort((a, b) => a.rows - b.rows);
  return [
    { name: "reckoned", label: "", points: sorted.map((one): [number, number] => [one.rows, one.ms]) },
    {
      name: "measured",
      label: "",
      isFaint: true,
      points: sorted.map((one): [number, number] => [one.rows, one.measured_ms]),
      bars: sorted.map((one) => one.measured_ms * one.relative_error),
    },
  ];
}

function passesInWords({ passes }: SpeculationReport): string {
  return `Pass time by rows: ${passes.map((one) => `${one.rows} rows ${one.ms} ms`).join(", ")}`;
}

function Lengths({ lengths }: { lengths: number[] }) {
  const all = lengths.reduce((sum, n) => sum + n, 0);
  if (!all) return <p class="note">No pass could carry a draft yet.</p>;
  return (
    <ul class="lengths">
      {lengths.map((n, i) => (
        <li key={i}>
          <span>{i}</span>
          <i style={{ width: `${(70 * n) / Math.max(...lengths)}%` }} aria-hidden="true" />
          <span class="muted">{percent(n / all)}</span>
        </li>
      ))}
    </ul>
  );
}

const TREATMENTS: Record<string, string> = {
  asked: "asked in most passes",
  tried: "tried now and then",
  left_out: "left out",
  switched_off: "switched off after failures",
};

function DrafterTable({ told }: { told: SpeculationReport }) {
  return (
    <div class="table" tabIndex={0} role="region" aria-label="Drafters">
      <table class="figures-table">
        <thead>
          <tr>
            {["drafter", "treatment", "asked in", "a guess", "first place", "judged"].map((one) => (
              <th key={one} scope="col">
                {one}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {Object.entries(told.drafters).map(([name, one]) => (
            <tr key={name}>
              <th scope="row">
                <Swatch source={name} /> {name}
              </th>
              <td>{TREATMENTS[one.treatment] ?? one.treatment}</td>
              <td>{percent(one.asked_share)}</td>
              <td>{one.guess_ms ? `${Number(one.guess_ms.toPrecision(2))} ms` : "–"}</td>
              <td>{one.places[0] ? percent(one.places[0].acceptance) : "–"}</td>
              <td>{grouped(one.places.reduce((sum, place) => sum + place.n_judged, 0))}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
