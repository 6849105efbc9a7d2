// Operators for a few rows on a CPU, where a step's time is the reading of weights and caches.
//
//   linnet::linear(x, w, bias?)                           x [..., K] times w [N, K]: [..., N]
//   linnet::attend(q, k, v, positions, scale, window?)    q [R, 1, H, D] to caches [R, T, J, D]
//
// Weights stay as a checkpoint has them. Their rows lie one after the other, so a product is one
// sweep over memory; it is prefetched a fixed distance ahead, since hardware prefetchers stop at
// the end of every page. Values are f32, bf16 or f16; all sums are in f32. Vectors are the
// compiler's own, as wide as the registers of the processor that the file is built on: wider ones
// would be taken apart in memory.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
using f32s = float __attribute__((vector_size(LANES * 4)));
using i32s = int32_t __attribute__((vector_size(LANES * 4)));

constexpr int64_t AHEAD = 16 << 10;  // bytes: the best of 2 to 32 KB where it was measured
constexpr int64_t GRAIN = 32 << 10;  // bytes of a weight: less is not worth a thread
constexpr int64_t CHUNK = 64;        // positions of a cache that one thread takes at a time
constexpr int CHAINS = 16 / LANES;   // vectors of a row that are summed apart: an addition takes time
constexpr int KEYS = LANES / 4;      // positions that are multiplied together

struct BF16 {
  uint16_t bits;
};

// LANES values, as f32. Compilers convert halves one by one where they are not told how.
inline f32s load(const float* p) {
  f32s x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
#if defined(__AVX512F__)
inline f32s load(const BF16* p) {
  auto bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (f32s)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
}
inline f32s load(const _Float16* p) {
  return (f32s)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
#elif defined(__AVX2__) && defined(__F16C__)
inline f32s load(const BF16* p) {
  auto bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (f32s)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
}
inline f32s load(const _Float16* p) {
  return (f32s)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
#else
inline f32s load(const BF16* p) {
  uint16_t __attribute__((vector_size(LANES * 2))) bits;
  std::memcpy(&bits, p, sizeof bits);
  auto wide = __builtin_convertvector(bits, i32s) << 16;
  f32s x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}
inline f32s load(const _Float16* p) {
  _Float16 __attribute__((vector_size(LANES * 2))) x;
  std::memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, f32s);
}
#endif
inline float one(const float* p) { return *p; }
inline float one(const _Float16* p) { return static_cast<float>(*p); }
inline float one(const BF16* p) {
  uint32_t bits = static_cast<uint32_t>(p->bits) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline void put(float* p, float x) { *p = x; }
inline void put(_Float16* p, float x) { *p = static_cast<_Float16>(x); }
inline void put(BF16* p, float x) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof x);
  if (x != x) {
    p->bits = 0x7fc0;
    return;
  }
  p->bits = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float sum(f32s x) {
  float values[LANES];
  std::memcpy(values, &x, sizeof x);
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) values[i] += values[half + i];
  return values[0];
}

// --- linear -----------------------------------------------------------------------------------

// How a row of T is multiplied: by what (X), and how many values at a time.
template <typename T>
struct Dot {
  using X = float;
  static constexpr int STEP = LANES;
  using Vector = f32s;
  static Vector read(const T* p) { return load(p); }
  static Vector read_x(const X* p) { return load(p); }
  static f32s add(f32s total, Vector w, Vector x) { return total + w * x; }
};
#ifdef __AVX512BF16__
template <>
struct Dot<BF16> {
  using X = BF16;
  static constexpr int STEP = 2 * LANES;
  using Vector = __m512i;
  static Vector read(const BF16* p) { return _mm512_loadu_si512(p); }
  static Vector read_x(const X* p) { return _mm512_loadu_si512(p); }
  static f32s add(f32s total, Vector w, Vector x) {
    return (f32s)_mm512_dpbf16_ps((__m512)total, (__m512bh)w, (__m512bh)x);
  }
};
#endif

// Rows of values of type T as rows of X.
template <typename T>
std::vector<typename Dot<T>::X> rows_of(const T* source, int64_t count) {
  std::vector<typename Dot<T>::X> rows(count);
  if constexpr (std::is_same_v<T, typename Dot<T>::X>)
    std::copy(source, source + count, rows.begin());
  else
    for (int64_t i = 0; i < count; i++) rows[i] = one(source + i);
  return rows;
}

// y[b][n]: row n of w, rows `step` apart, times row b of x, K values each.
template <typename T, int N, int B>
inline void product(const T* w, int64_t step, const typename Dot<T>::X* x, int64_t K,
                    float (&y)[B][N]) {
  using D = Dot<T>;
  f32s total[CHAINS][B][N] = {};
  int64_t k = 0;
  auto steps = [&]<int COUNT>() {
    for (; k + COUNT * D::STEP <= K; k += COUNT * D::STEP)
      for (int c = 0; c < COUNT; c++)
        for (int n = 0; n < N; n++) {
          const T* p = w + n * step + k + c * D::STEP;
          __builtin_prefetch(reinterpret_cast<const char*>(p) + AHEAD, 0, 2);  // to the second level
          auto weight = D::read(p);
          for (int b = 0; b < B; b++)
            total[c][b][n] = D::add(total[c][b][n], weight, D::read_x(x + b * K + k + c * D::STEP));
        }
  };
  steps.template operator()<CHAINS>();
  steps.template operator()<1>();
  for (int b = 0; b < B; b++)
    for (int n = 0; n < N; n++) {
      for (int c = 1; c < CHAINS; c++) total[0][b][n] += total[c][b][n];
      y[b][n] = sum(total[0][b][n]);
      for (int64_t i = k; i < K; i++)
        y[b][n] = std::fma(one(w + n * step + i), one(x + b * K + i), y[b][n]);
    }
}

template <typename T, int B>
void linear_rows(const T* w, const typename Dot<T>::X* x, const T* bias, T* y, int64_t N,
                 int64_t K) {
  int64_t grain = std::max<int64_t>(1, GRAIN / (K * static_cast<int64_t>(sizeof(T))));
  torch::stable::parallel_for(0, N, grain, [&](int64_t first, int64_t last) {
    for (int64_t n = first; n < last; n++) {
      float result[B][1];
      product<T, 1, B>(w + n * K, K, x, K, result);
      for (int b = 0; b < B; b++)
        put(y + b * N + n, bias ? result[b][0] + one(bias + n) : result[b][0]);
    }
  });
}

template <typename T>
void linear_of(const Tensor& x, const Tensor& w, const Tensor* bias, Tensor& y) {
  const int64_t N = w.size(0), K = w.size(1), M = x.numel() / K;
  auto rows = rows_of(static_cast<const T*>(x.const_data_ptr()), M * K);
  auto* weight = static_cast<const T*>(w.const_data_ptr());
  auto* offset = bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr;
  auto* result = static_cast<T*>(y.mutable_data_ptr());
  int64_t m = 0;
  auto sweep = [&]<int B>() {
    for (; m + B <= M; m += B)
      linear_rows<T, B>(weight, &rows[m * K], offset, result + m * N, N, K);
  };
  if constexpr (LANES == 16) sweep.template operator()<8>();  // fewer registers hold fewer sums
  sweep.template operator()<4>();
  sweep.template operator()<2>();
  sweep.template operator()<1>();
}

Tensor linear(const Tensor& x_given, const Tensor& w, const std::optional<Tensor>& bias) {
  Tensor x = torch::stable::contiguous(x_given);
  STD_TORCH_CHECK(x.dim() >= 1 && w.dim() == 2 && w.size(1) > 0,
                  "linnet::linear: x has ", x.dim(), " axes and w ", w.dim(),
                  "; it takes [..., K] and [N, K]");
  STD_TORCH_CHECK(w.is_contiguous(), "linnet::linear: the weight is not contiguous");
  if (bias)
    STD_TORCH_CHECK(bias->scalar_type() == w.scalar_type() && bias->dim() == 1 &&
                        bias->size(0) == w.size(0) && bias->is_contiguous(),
                    "linnet::linear: the bias is not a vector of ", w.size(0), " in w's dtype");
  STD_TORCH_CHECK(x.scalar_type() == w.scalar_type(), "linnet::linear: x and w differ in dtype");
  STD_TORCH_CHECK(x.size(x.dim() - 1) == w.size(1), "linnet::linear: x has ",
                  x.size(x.dim() - 1), " columns, w has ", w.size(1));
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = w.size(0);
  Tensor y = torch::stable::new_empty(x, shape);
  const Tensor* offset = bias ? &*bias : nullptr;
  switch (x.scalar_type()) {
    case ScalarType::Float: linear_of<float>(x, w, offset, y); break;
    case ScalarType::BFloat16: linear_of<BF16>(x, w, offset, y); break;
    case ScalarType::Half: linear_of<_Float16>(x, w, offset, y); break;
    default: STD_TORCH_CHECK(false, "linnet::linear: not f32, bf16 or f16");
  }
  return y;
}

// --- attend -----------------------------------------------------------------------------------

// e to the x, for x <= 0, to a few units in the last place; 0 below -87.
inline f32s exp_of(f32s given) {
  f32s x = given < -87.0f ? f32s{} - 87.0f : given;
  f32s scaled = x * 1.44269504f + 12582912.0f;  // the nearest whole number in the low bits
  f32s n = scaled - 12582912.0f;
  f32s r = x - n * 0.693359375f + n * 2.12194440e-4f;
  f32s p = 1.0f + r * (1.0f + r * (0.5f + r * (1.66666667e-1f + r * (4.16666667e-2f +
           r * (8.33333333e-3f + r * 1.38888889e-3f)))));
  i32s bits;
  std::memcpy(&bits, &p, sizeof p);
  bits += __builtin_convertvector(n, i32s) << 23;
  std::memcpy(&p, &bits, sizeof p);
  return given < -87.0f ? f32s{} : p;
}

// What one thread found in its stretch of positions: softmax is finished when all are there.
struct Part {
  float peak, total;
};

// y[g][d] = sum over t of p[g][t] * v[t][d], for V vectors of d.
template <typename T, int G, int V>
inline void mix(const float (&p)[G][CHUNK], const T* v, int64_t step, int64_t count, float* y,
                int64_t D) {
  f32s total[G][V] = {};
  for (int64_t t = 0; t < count; t++)
    for (int i = 0; i < V; i++) {
      f32s value = load(v + t * step + i * LANES);
      for (int g = 0; g < G; g++) total[g][i] += p[g][t] * value;
    }
  for (int g = 0; g < G; g++)
    for (int i = 0; i < V; i++) std::memcpy(y + g * D + i * LANES, &total[g][i], sizeof(f32s));
}

// G queries of one key head over `count` positions: their unfinished sums [G, D], and parts.
template <typename T, int G>
void attend_chunk(const typename Dot<T>::X* q, const T* k, int64_t k_step, const T* v,
                  int64_t v_step, int64_t count, int64_t D, float scale, float* sums, Part* parts) {
  float p[G][CHUNK];
  int64_t t = 0;
  for (; t + KEYS <= count; t += KEYS) {
    float score[G][KEYS];
    product<T, KEYS, G>(k + t * k_step, k_step, q, D, score);
    for (int g = 0; g < G; g++)
      for (int i = 0; i < KEYS; i++) p[g][t + i] = score[g][i] * scale;
  }
  for (; t < count; t++) {
    float score[G][1];
    product<T, 1, G>(k + t * k_step, k_step, q, D, score);
    for (int g = 0; g < G; g++) p[g][t] = score[g][0] * scale;
  }
  for (int g = 0; g < G; g++) {
    float peak = *std::max_element(p[g], p[g] + count);
    std::fill(p[g] + count, p[g] + CHUNK, -std::numeric_limits<float>::infinity());
    f32s total = {};
    for (t = 0; t < count; t += LANES) {
      f32s e = exp_of(load(p[g] + t) - peak);
      std::memcpy(p[g] + t, &e, sizeof e);
      total += e;
    }
    parts[g] = {peak, sum(total)};
  }
  int64_t d = 0;
  for (; d + 4 * LANES <= D; d += 4 * LANES) mix<T, G, 4>(p, v + d, v_step, count, sums + d, D);
  for (; d + LANES <= D; d += LANES) mix<T, G, 1>(p, v + d, v_step, count, sums + d, D);
  for (; d < D; d++)
    for (int g = 0; g < G; g++) {
      float total = 0;
      for (t = 0; t < count; t++) total += p[g][t] * one(v + t * v_step + d);
      sums[g * D + d] = total;
    }
}

template <typename T>
void attend_of(const Tensor& q, const Tensor& k, const Tensor& v, const int32_t* positions,
               float scale, int64_t window, Tensor& y) {
  const int64_t R = q.size(0), H = q.size(2), D = q.size(3), group = H / k.size(2);
  struct Item {
    int64_t row, begin;
  };
  std::vector<Item> items;
  for (int64_t r = 0; r < R; r++) {
    int64_t end = positions[r] + 1;
    for (int64_t t = window > 0 ? std::max<int64_t>(0, end - window) : 0; t < end; t += CHUNK)
      items.push_back({r, t});
  }
  const int64_t count = static_cast<int64_t>(items.size());
  auto queries = rows_of(static_cast<const T*>(q.const_data_ptr()), R * H * D);
  std::vector<float> sums(count * H * D);
  std::vector<Part> parts(count * H);
  auto* k_data = static_cast<const T*>(k.const_data_ptr());
  auto* v_data = static_cast<const T*>(v.const_data_ptr());
  const int64_t k_row = k.stride(0), k_step = k.stride(1), v_row = v.stride(0), v_step = v.stride(1);

  torch::stable::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      const auto [r, begin] = items[i];
      const int64_t length = std::min<int64_t>(CHUNK, positions[r] + 1 - begin);
      for (int64_t h = 0; h < H;) {
        const T* key = k_data + r * k_row + begin * k_step + h / group * D;
        const T* value = v_data + r * v_row + begin * v_step + h / group * D;
        auto chunk = [&]<int G>() {
          attend_chunk<T, G>(&queries[(r * H + h) * D], key, k_step, value, v_step, length, D,
                             scale, &sums[(i * H + h) * D], &parts[i * H + h]);
          h += G;
        };
        switch (std::min<int64_t>(4, group - h % group)) {
          case 4: chunk.template operator()<4>(); break;
          case 3: chunk.template operator()<3>(); break;
          case 2: chunk.template operator()<2>(); break;
          default: chunk.template operator()<1>();
        }
      }
    }
  });

  auto* out = static_cast<T*>(y.mutable_data_ptr());
  std::vector<float> mixed(D);
  for (int64_t r = 0, begin = 0, end = 0; r < R; r++, begin = end) {
    while (end < count && items[end].row == r) end++;
    for (int64_t h = 0; h < H; h++) {
      float peak = -std::numeric_limits<float>::infinity(), total = 0;
      for (int64_t i = begin; i < end; i++) peak = std::max(peak, parts[i * H + h].peak);
      std::fill(mixed.begin(), mixed.end(), 0.0f);
      for (int64_t i = begin; i < end; i++) {
        float factor = std::exp(parts[i * H + h].peak - peak);
        total += parts[i * H + h].total * factor;
        for (int64_t d = 0; d < D; d++) mixed[d] += sums[(i * H + h) * D + d] * factor;
      }
      for (int64_t d = 0; d < D; d++)
        put(out + (r * H + h) * D + d, end > begin ? mixed[d] / total : 0.0f);
    }
  }
}

Tensor attend(const Tensor& q_given, const Tensor& k, const Tensor& v, const Tensor& positions,
              double scale, std::optional<int64_t> window) {
  Tensor q = torch::stable::contiguous(q_given);
  Tensor places = torch::stable::contiguous(positions);
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && q.size(1) == 1,
                  "linnet::attend: it takes q [R, 1, H, D], k and v [R, T, J, D]");
  STD_TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(),
                  "linnet::attend: q, k and v differ in dtype");
  for (int64_t axis : {0, 1, 2, 3})
    STD_TORCH_CHECK(k.size(axis) == v.size(axis), "linnet::attend: k and v differ in axis ", axis,
                    ": ", k.size(axis), " and ", v.size(axis));
  STD_TORCH_CHECK(k.size(0) == q.size(0) && k.size(3) == q.size(3) && k.size(2) > 0 &&
                      q.size(2) % k.size(2) == 0,
                  "linnet::attend: q's rows, heads or head size do not fit the caches'");
  STD_TORCH_CHECK(places.scalar_type() == ScalarType::Int, "linnet::attend: positions are not i32");
  STD_TORCH_CHECK(places.numel() == q.size(0), "linnet::attend: ", places.numel(),
                  " positions for ", q.size(0), " rows");
  STD_TORCH_CHECK(k.stride(3) == 1 && k.stride(2) == k.size(3) && v.stride(3) == 1 &&
                      v.stride(2) == v.size(3),
                  "linnet::attend: a position's heads do not lie together");
  Tensor y = torch::stable::new_empty(q, q.sizes());
  auto* place = static_cast<const int32_t*>(places.const_data_ptr());
  for (int64_t r = 0; r < q.size(0); r++)
    STD_TORCH_CHECK(place[r] < k.size(1), "linnet::attend: position ", place[r],
                    " is beyond the cache's ", k.size(1));
  int64_t span = window.value_or(0);
  float factor = static_cast<float>(scale);
  switch (q.scalar_type()) {
    case ScalarType::Float: attend_of<float>(q, k, v, place, factor, span, y); break;
    case ScalarType::BFloat16: attend_of<BF16>(q, k, v, place, factor, span, y); break;
    case ScalarType::Half: attend_of<_Float16>(q, k, v, place, factor, span, y); break;
    default: STD_TORCH_CHECK(false, "linnet::attend: not f32, bf16 or f16");
  }
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(linnet, m) {
  m.def("linear(Tensor x, Tensor w, Tensor? bias=None) -> Tensor");
  m.def(
      "attend(Tensor q, Tensor k, Tensor v, Tensor positions, float scale, int? window=None) -> "
      "Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(linnet, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("attend", TORCH_BOX(&attend));
}
