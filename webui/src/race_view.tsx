// The view *Race*.

import { useSignal } from "@preact/signals";
import { Body } from "./body";
import { copied } from "./clipboard";
import { Figures } from "./figures";
import { Swatch } from "./legend";
import * as race from "./race";
import { Results } from "./race_results";
import { defaultOf, isReady, props } from "./server";

export function Race() {
  const { runs } = race;
  return (
    <main id="race" class="wide">
      <h2 class="title">Race</h2>
      <p class="muted">
        One prompt and one seed in several lanes. The texts have to be equal; the times say what drafting does to this prompt
        on this machine.
      </p>
      <Setup />
      {runs.value.length > 0 && (
        <>
          <Results />
          <div class="sides">
            {runs.value.map((run) => (
              <LaneText key={run.lane.id} run={run} />
            ))}
          </div>
        </>
      )}
      <Export />
    </main>
  );
}

function Setup() {
  const { lanes, prompt, together, isRacing } = race;
  const busy = isRacing.value;
  const start = (event: Event) => {
    event.preventDefault();
    if (busy) race.stopRace();
    else void race.race();
  };
  return (
    <form onSubmit={start} class="setup">
      <textarea
        id="race-prompt"
        rows={6}
        aria-label="Prompt of the race"
        value={prompt.value}
        disabled={busy}
        onInput={(event) => (prompt.value = event.currentTarget.value)}
      />
      <ol class="entries">
        {lanes.value.map((lane, i) => (
          <Entry key={lane.id} lane={lane} number={i + 1} />
        ))}
      </ol>
      <div class="actions">
        <button
          type="button"
          class="quiet"
          disabled={busy || lanes.value.length >= race.MOST_LANES}
          onClick={race.addLane}
        >
          Add a lane
        </button>
        <Small label="Seed" of={race.seed} placeholder="random" id="race-seed" />
        <Small label="Most tokens" of={race.maxTokens} placeholder={defaultOf("max_tokens")} id="race-most" />
        <label class="row">
          <input
            type="checkbox"
            checked={together.value}
            disabled={busy}
            onChange={(event) => (together.value = event.currentTarget.checked)}
          />{" "}
          All at once
        </label>
        <button id="start" type="submit" class={busy ? "stop" : ""} disabled={!busy && (!isReady.value || !prompt.value.trim())}>
          {busy ? "Stop" : "Start"}
        </button>
      </div>
      <p class="note">
        {together.value
          ? "For show: lanes that run at once slow each other down."
          : "In turn, so that times are fair. Sampling is that of the chat’s settings."}
      </p>
    </form>
  );
}

interface SmallProps {
  label: string;
  of: { value: string };
  placeholder: string;
  id: string;
}

function Small({ label, of, placeholder, id }: SmallProps) {
  return (
    <label class="small">
      {label}
      <input
        id={id}
        type="number"
        min={0}
        placeholder={placeholder}
        value={of.value}
        disabled={race.isRacing.value}
        onInput={(event) => (of.value = event.currentTarget.value)}
      />
    </label>
  );
}

function Entry({ lane, number }: { lane: race.Lane; number: number }) {
  const drafters = props.value?.speculation.drafters ?? [];
  const busy = race.isRacing.value;
  const toggle = (name: string) =>
    race.changeLane(lane.id, {
      types: lane.types.includes(name) ? lane.types.filter((one) => one !== name) : [...lane.types, name],
    });
  const field = (name: "nMax" | "pMin", label: string, step: number, fallback: string) => (
    <label class="small">
      {label}
      <input
        type="number"
        min={0}
        max={name === "pMin" ? 1 : undefined}
        step={step}
        placeholder={fallback}
        value={lane[name]}
        disabled={busy}
        onInput={(event) => race.changeLane(lane.id, { [name]: event.currentTarget.value })}
      />
    </label>
  );
  return (
    <li>
      <p class="head">
        <strong>{number}</strong> <span class="muted">{race.nameOf(lane)}</span>
        <button
          type="button"
          class="plain"
          disabled={busy || race.lanes.value.length <= 2}
          onClick={() => race.removeLane(lane.id)}
          aria-label={`Remove lane ${number}`}
        >
          ×
        </button>
      </p>
      <fieldset disabled={busy || lane.nMax === "0"}>
        <legend class="hidden">Drafters of lane {number}; none chosen: all</legend>
        {drafters.map((name) => (
          <label class="chip" key={name}>
            <input type="checkbox" checked={lane.types.includes(name)} onChange={() => toggle(name)} />
            <Swatch source={name} /> {name}
          </label>
        ))}
      </fieldset>
      {field("nMax", "Most drafted", 1, defaultOf("n_max"))}
      {field("pMin", "Least p", 0.05, defaultOf("p_min"))}
    </li>
  );
}

function LaneText({ run }: { run: race.Run }) {
  const number = race.runs.value.indexOf(run) + 1;
  return (
    <section aria-label={`Lane ${number}`}>
      <h3>
        {number} <span class="muted">{race.nameOf(run.lane)}</span>
      </h3>
      {run.failure && <p class="error">{run.failure.sentence}</p>}
      {run.reply && (
        <div class={`answer ${run.reply.state.value}`}>
          <Body reply={run.reply} part="text" markdown />
          <Figures reply={run.reply} />
        </div>
      )}
    </section>
  );
}

function Export() {
  const isOpen = useSignal(false);
  const kinds: [string, () => string][] = [
    ["curl", race.asCurl],
    ["Python", race.asPython],
  ];
  return (
    <details class="export" onToggle={(event) => (isOpen.value = event.currentTarget.open)}>
      <summary>As curl and Python</summary>
      {isOpen.value &&
        kinds.map(([name, text]) => (
          <figure class="code" key={name} id={`as-${name.toLowerCase()}`}>
            <figcaption>
              <span>{name}</span>
              <button type="button" class="plain" onClick={(event) => copied(text(), event.currentTarget)}>
                Copy
              </button>
            </figcaption>
            <pre tabIndex={0}>
              <code>{text()}</code>
            </pre>
          </figure>
        ))}
    </details>
  );
}
