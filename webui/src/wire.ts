// What the server sends, as far as the page reads it.

export interface Step {
  index: number;
  drafter: string | null;
  drafted: number[];
  drafted_pieces: string[];
  n_accepted: number;
  why_not: string | null;
}

// `sources` and `pieces` have one entry per token; servers without `steps` send none.
export interface Detail {
  sources: (string | null)[];
  pieces?: string[];
  steps?: Step[];
}

export interface CallPart {
  index: number;
  id?: string;
  function?: { name?: string; arguments?: string };
}

export interface DeltaPart {
  content?: string | null;
  reasoning_content?: string | null;
  reasoning?: string | null;
  tool_calls?: CallPart[];
}

export interface DrafterFigures {
  draft_n: number;
  draft_n_accepted: number;
  n_drafts: number;
  n_drafts_accepted: number;
  draft_n_per_position?: number[];
  draft_n_accepted_per_position?: number[];
  acceptance_rate_per_position: number[];
  calls: { begin: number; draft: number; accept: number };
  ms: { begin: number; draft: number; accept: number };
}

export interface Timings {
  cache_n: number;
  prompt_n: number;
  prompt_ms: number;
  prompt_per_second: number;
  predicted_n: number;
  predicted_ms: number;
  predicted_per_second: number;
  predicted_parts_ms?: { draft: number; verify: number; host: number };
  draft_n?: number;
  draft_n_accepted?: number;
  drafters?: Record<string, DrafterFigures>;
}

export interface SpeculationFigures {
  mean_acceptance_length: number;
  draft_acceptance_rate: number;
  acceptance_histogram: number[];
  num_spec_steps: number;
  num_accepted_draft_tokens: number;
  num_draft_tokens: number;
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens?: number };
}

export interface Chunk {
  choices: { delta: DeltaPart; finish_reason: string | null }[];
  spec?: Detail;
  timings?: Timings;
  metrics?: { speculative_decoding?: SpeculationFigures; time_to_first_token_ms?: number };
  speculative?: { types: string[]; n_max: number };
  usage?: Usage | null;
  seed?: number;
}

export type Part = { type: "image_url"; image_url: { url: string } } | { type: "text"; text: string };

export interface Turn {
  role: "system" | "user" | "assistant" | "tool";
  content: string | Part[] | null;
  reasoning_content?: string;
  tool_calls?: { id: string; type: "function"; function: { name: string; arguments: string } }[];
}

export interface Props {
  model_alias: string;
  model_path: string;
  total_slots: number;
  default_generation_settings: { n_ctx: number; params: Record<string, number> };
  settings: { draft_p_min?: number; max_body?: number | null; image_limit?: number }; // body: in MiB
  modalities: { vision: boolean };
  model: { n_pages?: number; page_size?: number };
  speculation: { drafters: string[]; disabled: string[]; n_max: number };
  engine: {
    n_waiting: number;
    n_pages_free: number;
    n_pages_cached: number;
    n_pages_held: number;
    n_completion_tokens: number;
  };
}

export interface Slot {
  id: number;
  n_ctx: number;
  is_processing: boolean;
  id_task: string | null;
  n_prompt_tokens: number;
  n_prompt_tokens_processed: number;
  n_prompt_tokens_cache: number;
  n_past: number;
  next_token: { n_remain: number; n_decoded: number }[];
  drafters: Record<string, DrafterFigures>;
  n_max?: number;
  drafter?: string | null;
  recent?: [number, number][]; // drafted and kept, of the last 64 steps
}

export interface SpeculationReport {
  why_not: string | null;
  explanation: string | null;
  drafted_share: number;
  off_s: number;
  passes: { rows: number; ms: number; measured_ms: number; age_s: number; relative_error: number }[];
  gap_ms: number;
  drafters: Record<
    string,
    {
      treatment: string;
      asked_share: number;
      guess_ms: number;
      fed_row_ms: number;
      places: { place: number; acceptance: number; n_judged: number }[];
    }
  >;
  lengths: number[];
  n_lengths: number[];
}
