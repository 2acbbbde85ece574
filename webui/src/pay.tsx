// Did drafting pay? What it cost and brought in one reply, and the same reply made plainly beside it.

import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { Body } from "./body";
import { type Answer, Conversation } from "./conversation";
import type { Failure } from "./failure";
import { Figures } from "./figures";
import { Swatch } from "./legend";
import { Plot } from "./plot";
import { Reply } from "./reply";
import { conversation, isWriting } from "./sending";
import { TARGET, whyNot } from "./sources";
import { acceptance, type End, grouped, percent, seconds } from "./tally";
import { chat, read } from "./transport";
import type { SpeculationReport } from "./wire";

export function Pay({ answer }: { answer: Answer }) {
  const { reply } = answer;
  if (!reply.end) return <p class="note pay">The server told no figures of this reply.</p>;
  return (
    <section class="pay" aria-label="Did it pay?">
      <Drafters reply={reply} end={reply.end} />
      <div class="pair">
        <Places end={reply.end} />
        <div>
          <Split end={reply.end} />
          <Undrafted reply={reply} />
        </div>
      </div>
      <PlainRun answer={answer} />
    </section>
  );
}

function Drafters({ reply, end }: { reply: Reply; end: End }) {
  const counts = reply.trail.counts();
  const figures = end.timings.drafters ?? {};
  const names = [...new Set([...Object.keys(figures), ...counts.keys()])].filter((one) => one !== TARGET);
  return (
    <div class="table" tabIndex={0} role="region" aria-label="Drafters">
      <table>
        <thead>
          <tr>
            {["", "of the text", "drafted", "accepted", "wasted", "its own time"].map((one) => (
              <th key={one} scope="col">
                {one || <span class="hidden">drafter</span>}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {names.map((name) => {
            const one = figures[name];
            return (
              <tr key={name}>
                <th scope="row">
                  <Swatch source={name} /> {name}
                </th>
                <td>{percent((counts.get(name) ?? 0) / Math.max(1, reply.trail.n))}</td>
                <td>{one ? grouped(one.draft_n) : "–"}</td>
                <td>{one ? grouped(one.draft_n_accepted) : "–"}</td>
                <td>{one ? grouped(one.draft_n - one.draft_n_accepted) : "–"}</td>
                <td>{one ? seconds(one.ms.begin + one.ms.draft + one.ms.accept) : "–"}</td>
              </tr>
            );
          })}
          <tr>
            <th scope="row">
              <Swatch source={TARGET} /> target
            </th>
            <td>{percent((counts.get(TARGET) ?? 0) / Math.max(1, reply.trail.n))}</td>
            <td colSpan={4} class="muted">
              {end.speculation ? `${grouped(end.speculation.num_spec_steps)} passes` : ""}
            </td>
          </tr>
        </tbody>
      </table>
    </div>
  );
}

function Places({ end }: { end: End }) {
  const lines = Object.entries(end.timings.drafters ?? {})
    .filter(([, one]) => one.draft_n)
    .map(([name, one]) => ({
      name,
      points: acceptance(one).map((share, i): [number, number] => [i + 1, share]),
    }));
  if (!lines.length) return null;
  return (
    <figure>
      <figcaption>Accepted, by place in the draft</figcaption>
      <Plot
        label={`Accepted share by place: ${lines.map((one) => `${one.name} ${one.points.map(([, y]) => percent(y)).join(", ")}`).join("; ")}`}
        lines={lines}
        x="place in the draft"
        y="accepted"
        top={1}
        format={percent}
      />
    </figure>
  );
}

// Of the time of generation, who took how much.
function Split({ end }: { end: End }) {
  const parts = end.timings.predicted_parts_ms;
  if (!parts) return null;
  const told = Object.entries(parts).map(([name, ms]) => [name, Math.max(0, ms)] as const);
  const whole = told.reduce((sum, [, ms]) => sum + ms, 0) || 1;
  return (
    <figure>
      <figcaption>Where {seconds(end.timings.predicted_ms)} went</figcaption>
      <div class="bar split" aria-hidden="true">
        {told.map(([name, ms]) => (
          <i key={name} class={name} style={{ flexGrow: ms / whole }} />
        ))}
      </div>
      <ul class="shares">
        {told.map(([name, ms]) => (
          <li key={name}>
            <i class={`key ${name}`} aria-hidden="true" /> {name} {seconds(ms)}{" "}
            <span class="muted">{percent(ms / whole)}</span>
          </li>
        ))}
      </ul>
    </figure>
  );
}

// Why steps had no draft: as the steps say, or the server of late where they say nothing.
function Undrafted({ reply }: { reply: Reply }) {
  const lately = useSignal<string | null>(null);
  const steps = reply.trail.steps.filter((step) => step.known);
  const reasons = new Map<string, number>();
  for (const { whyNot: reason } of steps) if (reason) reasons.set(reason, (reasons.get(reason) ?? 0) + 1);
  const isUnknown = !reply.end?.timings.draft_n && !reasons.size;
  useEffect(() => {
    if (!isUnknown) return;
    void read<SpeculationReport>("speculation").then(
      (told) => (lately.value = told.explanation),
      () => {},
    );
  }, [reply, isUnknown]);
  if (isUnknown) {
    const isAsked = reply.end?.nMax === 0;
    const reason = isAsked ? whyNot("not_asked_for") : lately.value;
    return <p>Nothing drafted{reason ? `: ${reason}.` : "."}</p>;
  }
  if (!reasons.size) return null;
  return (
    <figure>
      <figcaption>{reply.end?.timings.draft_n ? "Steps without a draft" : "Nothing drafted"}</figcaption>
      <ul class="reasons">
        {[...reasons].map(([reason, n]) => (
          <li key={reason}>
            {n} of {steps.length}: {whyNot(reason)}
          </li>
        ))}
      </ul>
    </figure>
  );
}

// Where the texts part, or -1.
export function firstDifference(a: string, b: string): number {
  if (a === b) return -1;
  let at = 0;
  while (at < a.length && at < b.length && a[at] === b[at]) at++;
  return at;
}

function told(reply: Reply): string {
  return [reply.thinking, reply.text, ...reply.calls.map((one) => `${one.name} ${one.given}`)].join("\n\n");
}

function PlainRun({ answer }: { answer: Answer }) {
  const { reply } = answer;
  const plain = useSignal<Reply | null>(null);
  const failure = useSignal<Failure | null>(null);
  const seed = reply.end?.seed;
  const canRun = reply.state.value === "done" && !reply.continued && typeof seed === "number";
  useEffect(() => () => control.value?.abort(), []);
  const control = useSignal<AbortController | null>(null);
  const run = async () => {
    failure.value = null;
    const fields = { ...reply.asked, seed, speculative: { ...(reply.asked.speculative as object), n_max: 0 } };
    const made = new Reply(fields, reply.system);
    plain.value = made;
    control.value = new AbortController();
    try {
      const messages = turnsOf(answer);
      for await (const chunk of chat({ ...fields, messages }, control.value.signal)) made.add(chunk);
      made.finish("done");
    } catch (error) {
      made.finish("failed");
      if (!control.value.signal.aborted) failure.value = error as Failure;
    }
  };
  const isRunning = plain.value?.state.value === "writing";
  return (
    <div class="plain-run">
      <button type="button" class="quiet" disabled={!canRun || isRunning || isWriting()} onClick={run}>
        Run plainly
      </button>
      <span class="note">
        {canRun
          ? "The same prompt and seed without drafts: the text has to be the same."
          : "Only a whole reply, made in one piece, can be compared."}
      </span>
      {failure.value && <p class="error">{failure.value.sentence}</p>}
      {plain.value && !failure.value && <Compared reply={reply} plain={plain.value} />}
    </div>
  );
}

function turnsOf(answer: Answer) {
  const now: Conversation = conversation.value;
  return now.turns(answer.parent, answer.reply.system);
}

function Compared({ reply, plain }: { reply: Reply; plain: Reply }) {
  const isOver = plain.state.value === "done";
  return (
    <>
      {isOver && <Verdict reply={reply} plain={plain} />}
      <div class="sides">
        <section aria-label="With drafts">
          <h3>With drafts</h3>
          <Body reply={reply} part="text" markdown />
          <Figures reply={reply} />
        </section>
        <section aria-label="Plainly">
          <h3>Plainly</h3>
          <Body reply={plain} part="text" markdown />
          <Figures reply={plain} />
        </section>
      </div>
    </>
  );
}

function Verdict({ reply, plain }: { reply: Reply; plain: Reply }) {
  const at = firstDifference(told(reply), told(plain));
  const [mine, other] = [reply.end?.timings.predicted_ms ?? 0, plain.end?.timings.predicted_ms ?? 0];
  const ratio = mine > 0 ? other / mine : 0;
  const meaning = ratio >= 1 ? "drafting paid" : "drafting cost more than it brought";
  return (
    <div class={at < 0 ? "verdict" : "verdict differs"} role="status">
      <p class="ratio">
        {ratio.toFixed(2)} × <span class="muted">{at < 0 ? meaning : ""}</span>
      </p>
      <p>
        {seconds(mine)} with drafts, {seconds(other)} plainly.{" "}
        {at < 0
          ? `The texts are equal: ${grouped(plain.end?.timings.predicted_n ?? 0)} tokens.`
          : `The texts differ from character ${at + 1} on. This should not happen: please report it.`}
      </p>
    </div>
  );
}
