// `verify`: a warp per span finds the first draft the target did not pick, and appends what is kept to the slot's text.
#include "device.cuh"

// Number of spans with rows before span `i`, which is how many rows before it have no draft. All lanes call it.
__device__ inline int n_undrafted(const int* span_starts, int i) {
  int n = 0;
  for (int first = 0; first < i; first += WARP) {
    const int other = first + threadIdx.x;
    n += __popc(__ballot_sync(FULL_WARP, other < i && span_starts[other] < span_starts[other + 1]));
  }
  return n;
}

// Grid (n_spans), one warp each.
__global__ void __launch_bounds__(WARP)
    verify(const long long* picks, const long long* drafts, const int* span_starts, const long long* slots,
           int* tokens, long long capacity, int* lengths, int* n_accepted, long long* next_ids) {
  const int span = blockIdx.x, lane = threadIdx.x;
  const long long slot = slots[span];
  const int first = span_starts[span], n_rows = span_starts[span + 1] - first;
  if (slot < 0 || n_rows <= 0) {
    if (lane == 0) {
      n_accepted[span] = 0;
      next_ids[span] = -1;
    }
    return;
  }
  const long long* own = picks + first;
  const long long* draft = drafts + first - n_undrafted(span_starts, span);
  int n = n_rows - 1;
  for (int at = 0; at < n_rows - 1; at += WARP) {
    const int i = at + lane;
    const bool refused = i < n_rows - 1 && (draft[i] < 0 || draft[i] != own[i]);
    const unsigned votes = __ballot_sync(FULL_WARP, refused);
    if (votes != 0) {
      n = at + __ffs(votes) - 1;
      break;
    }
  }
  const int length = lengths[slot];
  const int n_kept = own[n] >= 0 ? n + 1 : n;
  for (int i = lane; i < n_kept; i += WARP)
    if (length + i < capacity) tokens[slot * capacity + length + i] = static_cast<int>(own[i]);
  __syncwarp();  // every lane has read the length
  if (lane == 0) {
    lengths[slot] = length + n_kept;
    n_accepted[span] = n;
    next_ids[span] = own[n];
  }
}
