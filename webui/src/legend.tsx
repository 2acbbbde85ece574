// The drafters with their letters and tints.

import { props } from "./server";
import { letterOf, TARGET, tintOf } from "./sources";

export function Swatch({ source }: { source: string }) {
  return (
    <i class="swatch" data-source={tintOf(source)} aria-hidden="true">
      {letterOf(source)}
    </i>
  );
}

export function Legend() {
  const drafters = props.value?.speculation.drafters ?? [];
  return (
    <ul id="legend">
      {[TARGET, ...drafters].map((source) => (
        <li key={source}>
          <Swatch source={source} />
          <span>{source}</span>
        </li>
      ))}
    </ul>
  );
}
