// Plots in SVG. A line is told from another by its letter and its dashes as well as by its colour.

import { letterOf, tintOf } from "./sources";

export interface Line {
  name: string; // a drafter's, or any
  points: [x: number, y: number][];
  label?: string; // where the name is no drafter's
  isFaint?: boolean;
  bars?: number[]; // half of each point's error
}

interface PlotProps {
  label: string; // what it shows, for those who do not see it
  lines: Line[];
  x: string;
  y: string;
  top?: number; // of the y axis
  mark?: { x: number; label: string };
  format?: (y: number) => string;
}

const WIDTH = 560;
const HEIGHT = 280;
// Wide enough for labels of 19 px, which is 12 px where a plot is shown small.
const [LEFT, RIGHT, ABOVE, BELOW] = [64, 40, 34, 54];
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2"];

// A round step that divides a range into at most `n` parts.
export function stepOf(range: number, n: number): number {
  const rough = Math.max(range, 1e-9) / n;
  const power = 10 ** Math.floor(Math.log10(rough));
  return ([1, 2, 5, 10].find((one) => one * power >= rough) as number) * power;
}

function ticks(from: number, to: number, n: number, least = 0): number[] {
  const step = Math.max(least, stepOf(to - from, n));
  const first = Math.ceil(from / step) * step;
  return Array.from({ length: Math.floor((to - first) / step + 1e-6) + 1 }, (_, i) => first + i * step);
}

const short = (value: number) => `${Number(value.toPrecision(3))}`;

export function Plot({ label, lines, x, y, top, mark, format = short }: PlotProps) {
  const points = lines.flatMap((line) => line.points);
  if (!points.length) return <p class="note">Nothing measured yet.</p>;
  const xs = points.map(([at]) => at);
  const [low, high] = [Math.min(...xs), Math.max(...xs, Math.min(...xs) + 1)];
  const most = top ?? Math.max(...points.map(([, at]) => at), 1e-9) * 1.08;
  const px = (at: number) => LEFT + ((at - low) / (high - low)) * (WIDTH - LEFT - RIGHT);
  const py = (at: number) => HEIGHT - BELOW - (Math.min(at, most) / most) * (HEIGHT - ABOVE - BELOW);
  return (
    <svg class="plot" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={label}>
      {ticks(0, most, 4).map((at) => (
        <g key={at}>
          <line class="grid" x1={LEFT} x2={WIDTH - RIGHT} y1={py(at)} y2={py(at)} />
          <text x={LEFT - 8} y={py(at) + 4} text-anchor="end">
            {format(at)}
          </text>
        </g>
      ))}
      {ticks(low, high, 8, 1).map((at) => (
        <text key={at} x={px(at)} y={HEIGHT - BELOW + 22} text-anchor="middle">
          {short(at)}
        </text>
      ))}
      <text x={(LEFT + WIDTH - RIGHT) / 2} y={HEIGHT - 6} text-anchor="middle">
        {x}
      </text>
      <text x={0} y={16}>
        {y}
      </text>
      {mark && mark.x >= low && mark.x <= high && (
        <g class="mark">
          <line x1={px(mark.x)} x2={px(mark.x)} y1={ABOVE} y2={HEIGHT - BELOW} />
          <text x={px(mark.x) + 5} y={ABOVE + 10}>
            {mark.label}
          </text>
        </g>
      )}
      {lines.map((line, i) => (
        <Drawn key={line.name} line={line} dashes={DASHES[i % DASHES.length] as string} px={px} py={py} />
      ))}
    </svg>
  );
}

interface DrawnProps {
  line: Line;
  dashes: string;
  px: (at: number) => number;
  py: (at: number) => number;
}

function Drawn({ line, dashes, px, py }: DrawnProps) {
  const { name, points, label, isFaint, bars } = line;
  const last = points.at(-1);
  const source = label === undefined ? tintOf(name) : undefined;
  return (
    <g class={isFaint ? "drawn faint" : "drawn"} data-source={source}>
      <polyline points={points.map(([a, b]) => `${px(a)},${py(b)}`).join(" ")} stroke-dasharray={dashes} />
      {bars?.map((half, i) => {
        const [a, b] = points[i] as [number, number];
        return <line key={a} x1={px(a)} x2={px(a)} y1={py(b - half)} y2={py(b + half)} />;
      })}
      {points.map(([a, b]) => (
        <circle key={a} cx={px(a)} cy={py(b)} r="3">
          <title>{`${label ?? name}: ${short(a)}, ${short(b)}`}</title>
        </circle>
      ))}
      {last && (
        <text class="name" x={px(last[0]) + 8} y={py(last[1]) + 4}>
          {label === undefined ? letterOf(name) : label}
        </text>
      )}
    </g>
  );
}
