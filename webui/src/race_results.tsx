// What came of a race: a table of times, whether the texts are equal, and how drafts were accepted.

import { Plot } from "./plot";
import * as race from "./race";
import { acceptance, grouped, percent, seconds } from "./tally";

export function Results() {
  const { runs, raced } = race;
  const over = runs.value.filter((run) => run.reply?.state.value === "done" && run.reply.end);
  if (!over.length) return null;
  const times = over.map((run) => run.reply?.end?.timings.predicted_ms ?? 0);
  const slowest = Math.max(...times);
  const texts = new Set(over.map((run) => `${run.reply?.thinking}\n${run.reply?.text}`));
  return (
    <section class="results" aria-label="Results" aria-live="polite">
      <div class="table" tabIndex={0} role="region" aria-label="Times of the lanes">
        <table class="figures-table">
          <thead>
            <tr>
              {["lane", "tokens", "time", "tokens/s", "ratio", "accepted", "a pass"].map((one) => (
                <th key={one} scope="col">
                  {one}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {over.map((run) => (
              <Result key={run.lane.id} run={run} slowest={slowest} />
            ))}
          </tbody>
        </table>
      </div>
      {over.length > 1 && (
        <p class={texts.size === 1 ? "equal" : "error"} role="status">
          {texts.size === 1
            ? `The texts are equal (seed ${raced.value?.seed}).`
            : "The texts differ. This should not happen: please report it."}
        </p>
      )}
      <Curves runs={over} />
    </section>
  );
}

function Result({ run, slowest }: { run: race.Run; slowest: number }) {
  const end = run.reply?.end;
  if (!end) return null;
  const { timings, speculation } = end;
  return (
    <tr>
      <th scope="row">
        {race.runs.value.indexOf(run) + 1} <span class="muted">{race.nameOf(run.lane)}</span>
      </th>
      <td>{grouped(timings.predicted_n)}</td>
      <td>{seconds(timings.predicted_ms)}</td>
      <td>{timings.predicted_per_second.toFixed(1)}</td>
      <td>{timings.predicted_ms ? `${(slowest / timings.predicted_ms).toFixed(2)} ×` : "–"}</td>
      <td>{timings.draft_n ? `${percent((timings.draft_n_accepted ?? 0) / timings.draft_n)} of ${timings.draft_n}` : "–"}</td>
      <td>{speculation ? speculation.mean_acceptance_length.toFixed(2) : "1.00"}</td>
    </tr>
  );
}

// The share accepted at each place of a lane's drafts, whoever made them.
function Curves({ runs }: { runs: race.Run[] }) {
  const lines = runs.flatMap((run) => {
    const drafters = Object.values(run.reply?.end?.timings.drafters ?? {}).filter((one) => one.draft_n);
    if (!drafters.length) return [];
    const length = Math.max(...drafters.map((one) => acceptance(one).length));
    const share = (i: number) => {
      const told = drafters.filter((one) => acceptance(one).length > i);
      const weight = (one: (typeof told)[number]) => one.draft_n_per_position?.[i] ?? one.n_drafts;
      const all = told.reduce((sum, one) => sum + weight(one), 0);
      return told.reduce((sum, one) => sum + weight(one) * (acceptance(one)[i] ?? 0), 0) / Math.max(1, all);
    };
    const number = `${race.runs.value.indexOf(run) + 1}`;
    const points = Array.from({ length }, (_, i): [number, number] => [i + 1, share(i)]);
    return [{ name: number, label: number, points }];
  });
  if (!lines.length) return null;
  return (
    <figure>
      <figcaption>Accepted, by place in the draft; lines bear the lanes’ numbers</figcaption>
      <Plot
        label={lines.map((one) => `lane ${one.name}: ${one.points.map(([, y]) => percent(y)).join(", ")}`).join("; ")}
        lines={lines}
        x="place in the draft"
        y="accepted"
        top={1}
        format={percent}
      />
    </figure>
  );
}
