// Encode and decode-and-sum for CPUs: megatron_loco/kernels/reference.py in one pass over memory, bit for bit.
//
// Compiled at first use (cpu_build.py) with the vector width of the machine. GCC's and Clang's vector types instead of
// intrinsics, so that one text serves AVX-512, AVX2, SSE and NEON; the few places where an instruction does in one step
// what the types need several for are marked. Rules that keep the result equal to the reference:
//   - no fused multiply-add (-ffp-contract=off) outside the statistics, no -ffast-math;
//   - the largest magnitude is an integer maximum of bit patterns, so that NaN and Inf stay on top;
//   - round half to even by adding and subtracting 1.5 * 2^23, exact for |x| < 2^22; the sum's low bits are the integer.
//
// A group of blocks is worked on in three passes (compensate, quantise, store the error) over buffers that stay in the
// first-level cache. Blocks of a group are independent, so that the latencies of their maxima and divisions overlap.

#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif
#include <omp.h>

namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kMaxBlock = 4096;
constexpr int kGroup = 2048;  // elements: h, the old error and codes together take 18 KiB
constexpr int kStatistics = 4;
constexpr uint32_t kInfBits = 0x7F800000u;
constexpr uint32_t kMagnitude = 0x7FFFFFFFu;
constexpr float kRounder = 12582912.0f;    // 1.5 * 2^23
constexpr float kMinAmax = 0x1p-110f;      // core/quantize.py
constexpr float kFixedMin = 0x1p-100f;
constexpr float kFixedMax = 0x1p+100f;
constexpr uint32_t kStride = 0x91E10DA5u;  // core/error_feedback.py

typedef float F __attribute__((vector_size(4 * kLanes)));
typedef int32_t I __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U __attribute__((vector_size(4 * kLanes)));
typedef int8_t I8 __attribute__((vector_size(kLanes)));
typedef int16_t I16 __attribute__((vector_size(2 * kLanes)));
typedef uint16_t U16 __attribute__((vector_size(2 * kLanes)));

struct Half { uint16_t bits; };
struct BFloat { uint16_t bits; };

template <class V> inline V load(const void* from) { V v; std::memcpy(&v, from, sizeof v); return v; }
template <class V> inline void store(void* to, V v) { std::memcpy(to, &v, sizeof v); }
template <class To, class From> inline To bits_of(From v) {
  static_assert(sizeof(To) == sizeof(From), "");
  To out;
  std::memcpy(&out, &v, sizeof out);
  return out;
}
inline F splat(float x) { return F{} + x; }
inline I iota() { I v; for (int i = 0; i < kLanes; ++i) v[i] = i; return v; }

inline float half_to_float(uint16_t h) {
  // Shifted into place, a half is 2^-112 of its value; what was Inf or NaN keeps its exponent.
  const uint32_t shifted = (uint32_t)(h & 0x7FFF) << 13;
  uint32_t out = bits_of<uint32_t>(bits_of<float>(shifted) * 0x1p+112f);
  if (shifted >= 0x0F800000u) out = shifted | kInfBits;
  return bits_of<float>(out | (uint32_t)(h & 0x8000) << 16);
}
inline uint16_t float_to_half(float x) {
  const uint32_t all = bits_of<uint32_t>(x), magnitude = all & kMagnitude;
  const uint16_t sign = (uint16_t)(all >> 16 & 0x8000);
  if (magnitude > kInfBits) return sign | 0x7E00;
  if (magnitude >= 0x477FF000u) return sign | 0x7C00;  // 65520 and more round to Inf
  if (magnitude < 0x38800000u)  // below 2^-14: the spacing of 0.5 is that of subnormal halves
    return sign | (uint16_t)(bits_of<uint32_t>(bits_of<float>(magnitude) + 0.5f) - 0x3F000000u);
  return sign | (uint16_t)((magnitude - 0x38000000u + 0x0FFFu + (magnitude >> 13 & 1u)) >> 13);
}

// One or two vector instructions each where there are such; compilers take conversions of vectors apart.
inline I widen(I8 v) {
#if defined(__AVX512F__)
  return (I)_mm512_cvtepi8_epi32((__m128i)v);
#elif defined(__AVX2__)
  return (I)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)&v));
#else
  return __builtin_convertvector(v, I);
#endif
}
inline I widen(I16 v) {
#if defined(__AVX512F__)
  return (I)_mm512_cvtepi16_epi32((__m256i)v);
#elif defined(__AVX2__)
  return (I)_mm256_cvtepi16_epi32((__m128i)v);
#else
  return __builtin_convertvector(v, I);
#endif
}
inline void store_low_bytes(int8_t* to, I v) {
#if defined(__AVX512F__)
  store(to, _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__AVX2__)
  const __m256i low = _mm256_shuffle_epi8((__m256i)v, _mm256_set1_epi32(0x0C080400));
  store(to, _mm_unpacklo_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)) [0]);
#else
  store(to, __builtin_convertvector(v, I8));
#endif
}
inline I16 low_halves(I v) {
#if defined(__AVX512F__)
  return (I16)_mm512_cvtepi32_epi16((__m512i)v);
#else
  return __builtin_convertvector(v, I16);
#endif
}
// Past the caches, into which what is overwritten would only be read first; `to` has the alignment of V.
template <class V> inline void stream(void* to, V v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) return _mm512_stream_si512((__m512i*)to, bits_of<__m512i>(v));
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32) return _mm256_stream_si256((__m256i*)to, bits_of<__m256i>(v));
#endif
#if defined(__SSE2__)
  if constexpr (sizeof(V) == 16) return _mm_stream_si128((__m128i*)to, bits_of<__m128i>(v));
#endif
  store(to, v);
}
inline void end_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

inline F load_grad(const float* p) { return load<F>(p); }
inline F load_grad(const BFloat* p) {
#if defined(__AVX512F__)
  return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(p)), 16);
#else
  return bits_of<F>(__builtin_convertvector(load<U16>(p), U) << 16);
#endif
}
inline F load_grad(const Half* p) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps(load<__m256i>(p));
#else
  F v;
  for (int i = 0; i < kLanes; ++i) v[i] = half_to_float(p[i].bits);
  return v;
#endif
}

// A vector of sums in the type of the output.
inline F rounded_to(float, F v) { return v; }
inline I16 rounded_to(BFloat, F v) {
  const U u = bits_of<U>(v);
  U rounded = (u + (0x7FFFu + (u >> 16 & 1u))) >> 16;
  rounded = (u & kMagnitude) > kInfBits ? U{} + 0x7FC0u : rounded;
  return low_halves((I)rounded);
}
inline I16 rounded_to(Half, F v) {
#if defined(__AVX512F__)
  return (I16)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  I16 out;
  for (int i = 0; i < kLanes; ++i) out[i] = (int16_t)float_to_half(v[i]);
  return out;
#endif
}
inline float value_of(float x) { return x; }
inline float value_of(BFloat x) { return bits_of<float>((uint32_t)x.bits << 16); }
inline float value_of(Half x) { return half_to_float(x.bits); }

inline F add_square(F sum, F x) {
#if defined(__AVX512F__)
  return (F)_mm512_fmadd_ps((__m512)x, (__m512)x, (__m512)sum);
#else
  return sum + x * x;
#endif
}
inline I floor_to_int(F x) {
#if defined(__AVX512F__)
  return (I)_mm512_cvt_roundps_epi32((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
  const I truncated = __builtin_convertvector(x, I);
  return truncated + (I)(x < __builtin_convertvector(truncated, F));  // a comparison is -1 where it holds
#endif
}
inline U larger(U a, U b) { return a > b ? a : b; }
inline uint32_t largest(U v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epu32((__m512i)v);
#else
  uint32_t m = 0;
  for (int i = 0; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
#endif
}
inline float total(F v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s = 0;
  for (int i = 0; i < kLanes; ++i) s += v[i];
  return s;
#endif
}

// ------------------------------------------------------------------------------------------------ arguments

struct Run { int64_t element, numel, position, num_blocks, row, codes, scales; };  // tables.py
struct Exact { int64_t element, numel, values; };
struct Zeros { int64_t start, length; };

struct Table {
  const Run* runs;
  int64_t num_runs;
  const Exact* exact;
  int64_t num_exact;
  const Zeros* zeros;
  int64_t num_zeros;
  int64_t num_blocks;
};

struct Encode {
  Table table;
  const void* grad;
  void* error_codes;
  float* error_scales;
  uint8_t* send;
  const float* fixed_scale;
  double* statistics;
  int32_t dtype, bits, block_size, error_bits, reset, num_threads;
  float beta, one_minus_beta, inverse_limit, inverse_error_limit;
  uint32_t step_hash;
};

struct Decode {
  Table table;
  const uint8_t* recv;
  int64_t payload_bytes;
  void* output;
  int32_t dtype, bits, block_size, world_size, divisor, num_threads, streams;
};

inline int64_t share(int64_t count, int part, int parts) {
  return (int64_t)((__int128)count * part / parts);
}

// Calls f(run, index of the block in it) for this thread's share of all blocks.
template <class Function> void each_block(const Table& table, int thread, int threads, Function&& f) {
  int64_t position = share(table.num_blocks, thread, threads);
  const int64_t end = share(table.num_blocks, thread + 1, threads);
  int64_t low = 0, high = table.num_runs;  // the run that holds the first of them
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (table.runs[middle].position <= position ? low : high) = middle;
  }
  for (const Run* run = table.runs + low; position < end; ++run)
    for (; position < end && position < run->position + run->num_blocks; ++position) f(*run, position - run->position);
}

// ------------------------------------------------------------------------------------------------ encode

template <int kErrorBits> struct Stored { typedef int8_t Code; };
template <> struct Stored<16> { typedef int16_t Code; };
template <> struct Stored<32> { typedef float Code; };

template <int kErrorBits, class Code> inline F load_error(const Code* e, F scale) {
  if constexpr (kErrorBits == 8) return __builtin_convertvector(widen(load<I8>(e)), F) * scale;
  if constexpr (kErrorBits == 16) return __builtin_convertvector(widen(load<I16>(e)), F) * scale;
  if constexpr (kErrorBits == 32) return load<F>(e);
  return F{};
}

struct Block {
  const Run* run;
  int64_t index;
  int numel;       // elements that count; fewer than the block size in the last block of a run
  bool is_finite;
  bool is_live;
  float scale, inverse;
  float grad_sq, residual_sq, error_sq;
  uint32_t error_amax;
};

template <class T, int kErrorBits>
inline uint32_t compensate(const T* g, const typename Stored<kErrorBits>::Code* e, float scale, int size, float* h,
                           float* old, float* grad_sq) {
  U amax = {};
  F squares = {};
  const F error_scale = splat(scale);
#pragma GCC unroll 2
  for (int i = 0; i < size; i += kLanes) {
    const F grad = load_grad(g + i);
    squares = add_square(squares, grad);
    F sum = grad;
    if constexpr (kErrorBits != 0) {
      const F error = load_error<kErrorBits>(e + i, error_scale);
      store(old + i, error);
      sum = grad + error;
    }
    store(h + i, sum);
    amax = larger(amax, bits_of<U>(sum) & kMagnitude);
  }
  *grad_sq = total(squares);
  return largest(amax);
}

enum Rule { kNearest, kClamped, kSign };

// Codes, and in `old` the new error in fp32. The statistics of a block of signs leave out what fills it up.
template <Rule kRule, bool kKeep>
inline void quantize(const Encode& a, Block* block, const float* h, float* old, int8_t* codes) {
  const int size = a.block_size;
  const F inverse = splat(block->inverse), scale = splat(block->scale);
  const F beta = splat(a.beta), one_minus_beta = splat(a.one_minus_beta), rounder = splat(kRounder);
  const float limit = a.bits == 1 ? 1.0f : (float)((1 << (a.bits - 1)) - 1);
  const F high = splat(limit), low = splat(-limit), ones = splat(1.0f);
  F residual_sq = {}, error_sq = {};
  U error_amax = {};
#pragma GCC unroll 2
  for (int i = 0; i < size; i += kLanes) {
    const F value = load<F>(h + i);
    F code, residual;
    if constexpr (kRule == kSign) {
      const I negative = (value * inverse) < 0.0f;
      code = negative ? -ones : ones;
      store_low_bytes(codes + i, negative | 1);
      residual = value - code * scale;
      residual = iota() + i < block->numel ? residual : F{};
    } else {
      F scaled = value * inverse;
      if constexpr (kRule == kClamped) {
        scaled = scaled < low ? low : scaled;
        scaled = scaled > high ? high : scaled;
      }
      const F shifted = scaled + rounder;
      code = shifted - rounder;
      store_low_bytes(codes + i, bits_of<I>(shifted));
      residual = value - code * scale;
    }
    residual_sq = add_square(residual_sq, residual);
    if constexpr (kKeep) {
      const F updated = load<F>(old + i) * beta + residual * one_minus_beta;
      store(old + i, updated);
      error_sq = add_square(error_sq, updated);
      error_amax = larger(error_amax, bits_of<U>(updated) & kMagnitude);
    }
  }
  block->residual_sq = total(residual_sq);
  if constexpr (kKeep) {
    block->error_sq = total(error_sq);
    block->error_amax = largest(error_amax);
  }
}

// core/quantize.py: quantize_signs.
inline float mean_magnitude(const float* h, int size, int numel, float amax) {
  const F inverse = splat(4.0f / amax), rounder = splat(kRounder);
  I sums = {};
  for (int i = 0; i < size; i += kLanes) {
    const F magnitude = bits_of<F>(bits_of<U>(load<F>(h + i)) & kMagnitude);
    sums += bits_of<I>(magnitude * inverse * 65536.0f + rounder) - bits_of<I>(rounder);
  }
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += sums[i];
  return amax * (((float)sum / (float)numel) * 0x1p-18f);
}

// core/error_feedback.py: storage_dither, and floor(x + dither).
template <int kErrorBits>
inline void store_error(typename Stored<kErrorBits>::Code* e, float* scale, const float* updated, uint32_t amax_bits,
                        int size, uint32_t phase, float inverse_limit) {
  if constexpr (kErrorBits == 32) {
    std::memcpy(e, updated, sizeof(float) * size);
  } else {
    const float limit = kErrorBits == 8 ? 127.0f : 32767.0f;
    const float amax = bits_of<float>(amax_bits);
    const bool is_live = amax >= kMinAmax && amax_bits < kInfBits;
    const F inverse = splat(is_live ? limit / amax : 0.0f);
    const I high = I{} + (int32_t)limit, low = -high;
    U phases = (U)iota() * kStride + phase;
#pragma GCC unroll 2
    for (int i = 0; i < size; i += kLanes) {
      // 1 + u: the phase's upper 16 bits, and half a step, in the mantissa of a number in [1, 2).
      const F dither = bits_of<F>((phases >> 9 & 0x007FFF80u) | 0x3F800040u) - 1.0f;
      I code = floor_to_int(load<F>(updated + i) * inverse + dither);
      code = code < low ? low : code;
      code = code > high ? high : code;
      if constexpr (kErrorBits == 8) store_low_bytes(e + i, code);
      if constexpr (kErrorBits == 16) store(e + i, low_halves(code));
      phases += kLanes * kStride;
    }
    *scale = is_live ? amax * inverse_limit : amax_bits < kInfBits ? 0.0f : bits_of<float>(0x7FC00000u);
  }
}

template <int kBits> inline void pack(const int8_t* __restrict codes, int size, uint8_t* __restrict out) {
  if constexpr (kBits == 8) {
    std::memcpy(out, codes, size);
  } else {
    constexpr int kFields = 8 / kBits;
    const uint8_t* c = (const uint8_t*)codes;
    const int count = size / kFields;
    for (int i = 0; i < count; ++i) {
      unsigned byte = 0;
      for (int k = 0; k < kFields; ++k) {
        const unsigned field = c[i + k * count];
        byte |= (kBits == 1 ? field >> 7 : field & ((1u << kBits) - 1)) << (k * kBits);
      }
      out[i] = (uint8_t)byte;
    }
  }
}

// A sum of squares that fp32 holds without loss, or the same sum in fp64 (one gradient of 1e-23 has the square 0).
template <class Function> inline double sum_of_squares(float fast, int numel, Function&& at) {
  if (fast > 0x1p-80f && fast < 0x1p+100f) return fast;
  double sum = 0;
  for (int i = 0; i < numel; ++i) { const double x = at(i); sum += x * x; }
  return sum;
}

template <class T, int kErrorBits> struct Encoder {
  typedef typename Stored<kErrorBits>::Code Code;
  const Encode& a;
  double statistics[kStatistics] = {0, 0, 0, 0};
  alignas(64) float h[kMaxBlock], old[kMaxBlock];
  alignas(64) int8_t codes[kMaxBlock];
  alignas(64) T padded[kMaxBlock];
  Block blocks[kGroup / 32];
  int num_blocks = 0;

  explicit Encoder(const Encode& arguments) : a(arguments) {}

  int64_t row(const Block& block) const { return block.run->row + block.index; }
  Code* error_of(const Block& block) const { return (Code*)a.error_codes + row(block) * a.block_size; }
  const T* grad_of(const Block& block) const {
    return (const T*)a.grad + block.run->element + block.index * a.block_size;
  }

  void add(const Run& run, int64_t index) {
    const int64_t left = run.numel - index * a.block_size;
    Block& block = blocks[num_blocks];
    block.run = &run;
    block.index = index;
    block.numel = left < a.block_size ? (int)left : a.block_size;
    const T* grad = grad_of(block);
    if (block.numel < a.block_size) {
      std::memset(padded, 0, sizeof(T) * a.block_size);
      std::memcpy(padded, grad, sizeof(T) * block.numel);
      grad = padded;
    }
    const float error_scale = kErrorBits == 8 || kErrorBits == 16 ? a.error_scales[row(block)] : 0.0f;
    const int at = num_blocks * a.block_size;
    const Code* error = kErrorBits ? error_of(block) : nullptr;
    const uint32_t amax_bits =
        compensate<T, kErrorBits>(grad, error, error_scale, a.block_size, h + at, old + at, &block.grad_sq);
    choose_scale(&block, amax_bits, h + at);
    if ((++num_blocks + 1) * a.block_size > (a.block_size > kGroup ? a.block_size : kGroup)) flush();
  }

  void choose_scale(Block* block, uint32_t amax_bits, const float* values) {
    const float amax = bits_of<float>(amax_bits);
    block->is_finite = amax_bits < kInfBits;
    block->is_live = block->is_finite && amax >= kMinAmax;
    const float limit = a.bits == 1 ? 1.0f : (float)((1 << (a.bits - 1)) - 1);
    float scale = 0.0f, inverse = 0.0f;
    if (a.fixed_scale) {
      const float fixed = *a.fixed_scale;
      if (!(fixed >= kFixedMin && fixed <= kFixedMax)) block->is_finite = block->is_live = false;
      if (block->is_live) scale = fixed, inverse = a.bits == 1 ? 1.0f : 1.0f / fixed;
    } else if (block->is_live && a.bits == 1) {
      scale = mean_magnitude(values, a.block_size, block->numel, amax), inverse = 1.0f;
    } else if (block->is_live) {
      scale = amax * a.inverse_limit, inverse = limit / amax;
    }
    block->scale = block->is_finite ? scale : bits_of<float>(0x7FC00000u);
    block->inverse = inverse;
  }

  void flush() {
    constexpr bool kKeeps = kErrorBits != 0;
    for (int b = 0; b < num_blocks; ++b) {
      Block& block = blocks[b];
      const int at = b * a.block_size;
      if (!block.is_finite) {
        std::memset(codes + at, a.bits == 1, a.block_size);
      } else if (kKeeps && !a.reset) {
        quantize_by_rule<kKeeps>(&block, h + at, old + at, codes + at);
      } else {
        quantize_by_rule<false>(&block, h + at, old + at, codes + at);
      }
    }
    for (int b = 0; b < num_blocks; ++b) {
      Block& block = blocks[b];
      const int at = b * a.block_size;
      write_codes(block, codes + at);
      if constexpr (kKeeps) {
        if (a.reset) {
          std::memset(error_of(block), 0, sizeof(Code) * a.block_size);
          if (kErrorBits != 32) a.error_scales[row(block)] = 0.0f;
        } else if (block.is_finite) {
          const uint32_t element = (uint32_t)((uint64_t)row(block) * (uint64_t)a.block_size);
          store_error<kErrorBits>(error_of(block), a.error_scales + row(block), old + at, block.error_amax,
                                  a.block_size, element * kStride + a.step_hash, a.inverse_error_limit);
        }
      }
      count(block, h + at, old + at, codes + at);
    }
    num_blocks = 0;
  }

  template <bool kKeep> void quantize_by_rule(Block* block, const float* values, float* error, int8_t* out) {
    if (a.bits == 1) quantize<kSign, kKeep>(a, block, values, error, out);
    else if (a.fixed_scale) quantize<kClamped, kKeep>(a, block, values, error, out);
    else quantize<kNearest, kKeep>(a, block, values, error, out);
  }

  void write_codes(const Block& block, const int8_t* from) {
    uint8_t* to = a.send + block.run->codes + block.index * (a.block_size * a.bits / 8);
    if (a.bits == 4) pack<4>(from, a.block_size, to);
    else if (a.bits == 8) pack<8>(from, a.block_size, to);
    else if (a.bits == 2) pack<2>(from, a.block_size, to);
    else pack<1>(from, a.block_size, to);
    std::memcpy(a.send + block.run->scales + block.index * sizeof(float), &block.scale, sizeof(float));
  }

  void count(const Block& block, const float* values, const float* error, const int8_t* sent) {
    if (!block.is_finite) {
      statistics[3] += 1;
      return;
    }
    const T* grad = grad_of(block);
    statistics[0] += sum_of_squares(block.grad_sq, block.numel, [&](int i) { return (double)value_of(grad[i]); });
    statistics[1] += sum_of_squares(block.residual_sq, block.numel,
                                    [&](int i) { return (double)(values[i] - (float)sent[i] * block.scale); });
    if (kErrorBits != 0 && !a.reset)
      statistics[2] += sum_of_squares(block.error_sq, block.numel, [&](int i) { return (double)error[i]; });
  }
};

template <class T, int kErrorBits> void encode_blocks(const Encode& a, int thread, int threads, double* statistics) {
  Encoder<T, kErrorBits> encoder(a);
  each_block(a.table, thread, threads, [&](const Run& run, int64_t index) { encoder.add(run, index); });
  encoder.flush();
  std::memcpy(statistics, encoder.statistics, sizeof encoder.statistics);
}

template <class T> void encode_thread(const Encode& a, int thread, int threads, double* statistics) {
  for (int64_t r = 0; r < a.table.num_exact; ++r) {
    const Exact& range = a.table.exact[r];
    const int64_t first = share(range.numel, thread, threads), last = share(range.numel, thread + 1, threads);
    std::memcpy(a.send + range.values + first * sizeof(T), (const T*)a.grad + range.element + first,
                (last - first) * sizeof(T));
  }
  if (thread == 0)
    for (int64_t z = 0; z < a.table.num_zeros; ++z)
      std::memset(a.send + a.table.zeros[z].start, 0, a.table.zeros[z].length);
  if (!a.table.num_blocks) return;
  if (a.error_bits == 0) encode_blocks<T, 0>(a, thread, threads, statistics);
  else if (a.error_bits == 8) encode_blocks<T, 8>(a, thread, threads, statistics);
  else if (a.error_bits == 16) encode_blocks<T, 16>(a, thread, threads, statistics);
  else encode_blocks<T, 32>(a, thread, threads, statistics);
}

// ------------------------------------------------------------------------------------------------ decode

template <int kBits> inline int code_at(unsigned byte, int k) {
  if constexpr (kBits == 8) return (int8_t)byte;
  const int code = (int)(byte << (32 - kBits * (k + 1))) >> (32 - kBits);
  return kBits == 1 ? code | 1 : code;
}

// The block of one payload.
struct Piece {
  const uint8_t* codes;
  float scale;
};

// Sum of one block over one or two payloads, in order; with kFirst they are the first, else they are added to `sum`.
template <int kBits, int kPieces, bool kFirst>
inline void add_pieces(Piece a, Piece b, int size, float* __restrict sum) {
  constexpr int kFields = 8 / kBits;
  const int count = size / kFields;
#if defined(__AVX512F__)
  if (kBits < 8 && count % kLanes == 0) {
    // Tables of all products; the lookup takes 4 bits of its index and so needs no mask.
    F table;
    for (int i = 0; i < kLanes; ++i) table[i] = (float)code_at<kBits>(i, 0);
    const F products_a = table * a.scale, products_b = table * b.scale;
    for (int i = 0; i < count; i += kLanes) {
      const __m512i bytes_a = _mm512_cvtepu8_epi32(load<__m128i>(a.codes + i));
      const __m512i bytes_b = kPieces == 2 ? _mm512_cvtepu8_epi32(load<__m128i>(b.codes + i)) : bytes_a;
      for (int k = 0; k < kFields; ++k) {
        float* to = sum + k * count + i;
        F value = (F)_mm512_permutexvar_ps(_mm512_srli_epi32(bytes_a, k * kBits), (__m512)products_a);
        if (!kFirst) value = load<F>(to) + value;
        if (kPieces == 2)
          value += (F)_mm512_permutexvar_ps(_mm512_srli_epi32(bytes_b, k * kBits), (__m512)products_b);
        store(to, value);
      }
    }
    return;
  }
#endif
  for (int k = 0; k < kFields; ++k)
    for (int i = 0; i < count; ++i) {
      float value = (float)code_at<kBits>(a.codes[i], k) * a.scale;
      if (!kFirst) value = sum[k * count + i] + value;
      if (kPieces == 2) value += (float)code_at<kBits>(b.codes[i], k) * b.scale;
      sum[k * count + i] = value;
    }
}

struct Divide {
  bool by_product;  // exact for powers of two, and so the same
  float factor;
  explicit Divide(int divisor)
      : by_product((divisor & (divisor - 1)) == 0), factor(by_product ? 1.0f / divisor : (float)divisor) {}
  template <class V> inline V operator()(V x) const { return by_product ? x * factor : x / factor; }
};

template <class T> inline void write_sum(const float* sum, int numel, Divide divide, T* out, bool streams) {
  int i = 0;
  if (streams && (uintptr_t)out % (sizeof(T) * kLanes) == 0)
    for (; i + kLanes <= numel; i += kLanes) stream(out + i, rounded_to(T{}, divide(load<F>(sum + i))));
  for (; i + kLanes <= numel; i += kLanes) store(out + i, rounded_to(T{}, divide(load<F>(sum + i))));
  if (i == numel) return;
  const auto last = rounded_to(T{}, divide(load<F>(sum + i)));  // `sum` is longer than numel by a vector
  std::memcpy(out + i, &last, sizeof(T) * (numel - i));
}

template <class T, int kBits> void decode_blocks(const Decode& a, int thread, int threads) {
  alignas(64) float sum[kMaxBlock];
  const Divide divide(a.divisor);
  const int size = a.block_size;
  const int64_t code_bytes = size * kBits / 8;
  each_block(a.table, thread, threads, [&](const Run& run, int64_t index) {
    const uint8_t* codes = a.recv + run.codes + index * code_bytes;
    const uint8_t* scales = a.recv + run.scales + index * sizeof(float);
    const auto piece = [&](int source) {
      return Piece{codes + source * a.payload_bytes, load<float>(scales + source * a.payload_bytes)};
    };
    // In pairs, which halves what is read and written of the sum.
    if (a.world_size == 1) add_pieces<kBits, 1, true>(piece(0), piece(0), size, sum);
    else add_pieces<kBits, 2, true>(piece(0), piece(1), size, sum);
    int source = 2;
    for (; source + 1 < a.world_size; source += 2)
      add_pieces<kBits, 2, false>(piece(source), piece(source + 1), size, sum);
    if (source < a.world_size) add_pieces<kBits, 1, false>(piece(source), piece(source), size, sum);
    const int64_t left = run.numel - index * size;
    write_sum(sum, left < size ? (int)left : size, divide, (T*)a.output + run.element + index * size,
              a.streams);
  });
}

template <class T> void decode_thread(const Decode& a, int thread, int threads) {
  T* output = (T*)a.output;
  const Divide divide(a.divisor);
  for (int64_t r = 0; r < a.table.num_exact; ++r) {
    const Exact& range = a.table.exact[r];
    const int64_t last = share(range.numel, thread + 1, threads);
    for (int64_t i = share(range.numel, thread, threads); i < last; i += kGroup) {
      alignas(64) float sum[kGroup + kLanes] = {};
      const int count = last - i < kGroup ? (int)(last - i) : kGroup;
      const uint8_t* values = a.recv + range.values + i * sizeof(T);
      for (int source = 0; source < a.world_size; ++source)
        for (int k = 0; k < count; ++k) {
          const float value = value_of(load<T>(values + source * a.payload_bytes + k * sizeof(T)));
          sum[k] = source ? sum[k] + value : value;
        }
      write_sum(sum, count, divide, output + range.element + i, a.streams);
    }
  }
  for (int64_t z = 0; z < a.table.num_zeros; ++z) {
    const Zeros& range = a.table.zeros[z];
    const int64_t first = share(range.length, thread, threads), last = share(range.length, thread + 1, threads);
    std::memset(output + range.start + first, 0, (last - first) * sizeof(T));
  }
  if (!a.table.num_blocks) return;
  if (a.bits == 4) decode_blocks<T, 4>(a, thread, threads);
  else if (a.bits == 8) decode_blocks<T, 8>(a, thread, threads);
  else if (a.bits == 2) decode_blocks<T, 2>(a, thread, threads);
  else decode_blocks<T, 1>(a, thread, threads);
}

constexpr int kMaxThreads = 256;

}  // namespace

extern "C" {

void loco_encode(const Encode* a) {
  static_assert(kMaxThreads * kStatistics * sizeof(double) <= 16384, "on the stack");
  double partial[kMaxThreads][kStatistics] = {};
  const int threads = a->num_threads < kMaxThreads ? a->num_threads : kMaxThreads;
#pragma omp parallel num_threads(threads)
  {
    const int thread = omp_get_thread_num(), team = omp_get_num_threads();
    if (a->dtype == 0) encode_thread<float>(*a, thread, team, partial[thread]);
    else if (a->dtype == 1) encode_thread<BFloat>(*a, thread, team, partial[thread]);
    else encode_thread<Half>(*a, thread, team, partial[thread]);
  }
  for (int t = 0; t < threads; ++t)  // in the order of threads: the same sum every time
    for (int i = 0; i < kStatistics; ++i) a->statistics[i] += partial[t][i];
}

void loco_decode_sum(const Decode* a) {
  const int threads = a->num_threads < kMaxThreads ? a->num_threads : kMaxThreads;
#pragma omp parallel num_threads(threads)
  {
    const int thread = omp_get_thread_num(), team = omp_get_num_threads();
    if (a->dtype == 0) decode_thread<float>(*a, thread, team);
    else if (a->dtype == 1) decode_thread<BFloat>(*a, thread, team);
    else decode_thread<Half>(*a, thread, team);
    if (a->streams) end_streams();
  }
}

}  // extern "C"
