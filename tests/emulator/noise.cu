// What `choose` computes per token on the device, by itself: against published vectors and against torch.
#include "choose/mass.cuh"
#include "choose/noise.cuh"

// counters [n, 4], keys [n, 2], words [n, 4]
__global__ void published(const int* counters, const int* keys, int* words) {
  const int i = threadIdx.x;
  const int* c = counters + 4 * i;
  const Words found = philox(c[0], c[1], c[2], c[3], keys[2 * i], keys[2 * i + 1]);
  for (int j = 0; j < 4; ++j) words[4 * i + j] = static_cast<int>(found.of[j]);
}

// words, noise [n]
__global__ void draws(long long seed, long long position, int n, int* words, float* noise) {
  const Stream stream{static_cast<unsigned>(seed), static_cast<unsigned>(static_cast<unsigned long long>(seed) >> 32),
                      static_cast<unsigned>(position)};
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    words[i] = static_cast<int>(word_of(stream, i));
    noise[i] = gumbel(word_of(stream, i));
  }
}

__global__ void gumbels(const int* words, int n, float* noise, float* floors) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    noise[i] = gumbel(static_cast<unsigned>(words[i]));
    floors[i] = gumbel_floor(static_cast<unsigned>(words[i]));
  }
}

__global__ void weighed(const float* distances, int n, float* weights, long long* masses, int* buckets) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    weights[i] = weight_of(distances[i]);
    masses[i] = static_cast<long long>(mass_of(distances[i]));
    buckets[i] = bucket_of(distances[i]);
  }
}
