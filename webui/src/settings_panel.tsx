// The settings of requests. What is empty is the server's, and its value is shown in grey.

import { useSignal } from "@preact/signals";
import { Legend } from "./legend";
import { defaultOf, readProps, trouble } from "./server";
import { type Field, faultOfTools, fields, SAMPLING, SPECULATION, system, tinted, tools } from "./settings";
import { key } from "./transport";

function NumberField({ field }: { field: Field }) {
  const { name, label, min, max, step } = field;
  const value = fields[name];
  if (!value) return null;
  return (
    <label class="field">
      <span>{label}</span>
      <input
        id={name}
        type="number"
        min={min}
        max={max}
        step={step}
        placeholder={defaultOf(name)}
        value={value.value}
        onInput={(event) => (value.value = event.currentTarget.value)}
      />
    </label>
  );
}

export function SettingsPanel() {
  const fault = faultOfTools();
  const given = useSignal(key.get());
  return (
    <>
      <section>
        <h2>Who wrote a token</h2>
        <Legend />
        <label class="row">
          <input
            id="ink"
            type="checkbox"
            checked={tinted.value === "yes"}
            onChange={(event) => (tinted.value = event.currentTarget.checked ? "yes" : "no")}
          />{" "}
          Tint tokens
        </label>
      </section>
      <section>
        <h2>System prompt</h2>
        <textarea
          id="system"
          rows={3}
          aria-label="System prompt"
          placeholder="none"
          value={system.value}
          onInput={(event) => (system.value = event.currentTarget.value)}
        />
      </section>
      <section>
        <h2>Speculation</h2>
        {SPECULATION.map((field) => (
          <NumberField key={field.name} field={field} />
        ))}
        <p class="note">0 drafted tokens is plain decoding. Same seed, same text.</p>
      </section>
      <section>
        <h2>Sampling</h2>
        {SAMPLING.map((field) => (
          <NumberField key={field.name} field={field} />
        ))}
        <p class="note">Grey values are the server’s.</p>
      </section>
      <section>
        <h2>Tools</h2>
        <textarea
          id="tools"
          rows={2}
          aria-label="Tools as JSON"
          placeholder='[{"type": "function", …}]'
          value={tools.value}
          onInput={(event) => (tools.value = event.currentTarget.value)}
        />
        {fault && <p class="error">Not sent: {fault}</p>}
      </section>
      <form onSubmit={(event) => event.preventDefault()}>
        <h2>API key</h2>
        <input
          id="key"
          type="password"
          autocomplete="off"
          aria-label="API key"
          placeholder="none"
          value={given.value}
          onInput={(event) => {
            given.value = event.currentTarget.value;
            key.set(given.value);
          }}
          onChange={() => {
            trouble.value = null;
            void readProps();
          }}
        />
        <p class="note">Kept until this tab is closed.</p>
      </form>
    </>
  );
}
