// What this machine can do at most: reading memory, and multiplying small integers from registers.
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>

#include <sys/mman.h>

namespace {

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds of fn(thread) on all threads at once, the best of several.
template <class Fn>
double best_time(int num_threads, int repeats, Fn&& fn) {
  double best = 1e9;
  for (int i = 0; i < repeats; ++i) {
    std::atomic<int> ready{0};
    std::atomic<bool> go{false};
    std::vector<std::thread> threads;
    for (int t = 0; t < num_threads; ++t) {
      threads.emplace_back([&, t] {
        ready.fetch_add(1);
        while (!go.load()) {
        }
        fn(t);
      });
    }
    while (ready.load() < num_threads) {
    }
    const double start = now_s();
    go.store(true);
    for (std::thread& thread : threads) thread.join();
    best = std::min(best, now_s() - start);
  }
  return best;
}

__attribute__((target("avx2"), noinline)) void read_all(const char* memory, size_t size) {
  __m256i sum[8];
  for (auto& s : sum) s = _mm256_setzero_si256();
  for (size_t at = 0; at < size; at += sizeof(sum)) {
    for (int i = 0; i < 8; ++i) {
      sum[i] = _mm256_add_epi8(sum[i], _mm256_load_si256(reinterpret_cast<const __m256i*>(memory + at) + i));
    }
  }
  for (auto& s : sum) asm volatile("" : "+x"(s));
}

constexpr int64_t kRounds = 1 << 22;
constexpr int kChains = 8;  // independent sums, enough to hide every latency

// By hand: a compiler would hoist, merge or spill.
__attribute__((target("avx2"), noinline)) void avx2_int8() {
  const __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(5);
  __m256i s0 = a, s1 = a, s2 = a, s3 = a, s4 = a, s5 = a, s6 = a, s7 = a, product;
  for (int64_t i = 0; i < kRounds; ++i) {
    asm volatile(
        "vpmaddubsw %10, %9, %8\n\tvpaddw %8, %0, %0\n\tvpmaddubsw %10, %9, %8\n\tvpaddw %8, %1, %1\n\tvpmaddubsw %10, %9, %8\n\tvpaddw %8, %2, %2\n\tvpmaddubsw %10, %9, %8\n\tvpaddw %8, %3, %3\n\tvpmaddubsw %10, %9, %8\n\tvpaddw %8, %4, %4\n\tvpmaddubsw %10, %9, %8\n\tvpaddw %8, %5, %5\n\tvpmaddubsw %10, %9, %8\n\tvpaddw %8, %6, %6\n\tvpmaddubsw %10, %9, %8\n\tvpaddw %8, %7, %7"
        : "+x"(s0), "+x"(s1), "+x"(s2), "+x"(s3), "+x"(s4), "+x"(s5), "+x"(s6), "+x"(s7), "=&x"(product)
        : "x"(a), "x"(b));
  }
}

__attribute__((target("avx2"), noinline)) void avx2_int16() {
  const __m256i a = _mm256_set1_epi16(3), b = _mm256_set1_epi16(5);
  __m256i s0 = a, s1 = a, s2 = a, s3 = a, s4 = a, s5 = a, s6 = a, s7 = a, product;
  for (int64_t i = 0; i < kRounds; ++i) {
    asm volatile(
        "vpmaddwd %10, %9, %8\n\tvpaddd %8, %0, %0\n\tvpmaddwd %10, %9, %8\n\tvpaddd %8, %1, %1\n\tvpmaddwd %10, %9, %8\n\tvpaddd %8, %2, %2\n\tvpmaddwd %10, %9, %8\n\tvpaddd %8, %3, %3\n\tvpmaddwd %10, %9, %8\n\tvpaddd %8, %4, %4\n\tvpmaddwd %10, %9, %8\n\tvpaddd %8, %5, %5\n\tvpmaddwd %10, %9, %8\n\tvpaddd %8, %6, %6\n\tvpmaddwd %10, %9, %8\n\tvpaddd %8, %7, %7"
        : "+x"(s0), "+x"(s1), "+x"(s2), "+x"(s3), "+x"(s4), "+x"(s5), "+x"(s6), "+x"(s7), "=&x"(product)
        : "x"(a), "x"(b));
  }
}

__attribute__((target("avx512f,avx512vnni"), noinline)) void vnni_int8() {
  const __m512i a = _mm512_set1_epi32(0x03030303), b = _mm512_set1_epi32(0x05050505);
  __m512i s0 = a, s1 = a, s2 = a, s3 = a, s4 = a, s5 = a, s6 = a, s7 = a;
  for (int64_t i = 0; i < kRounds; ++i) {
    asm volatile(
        "vpdpbusd %9, %8, %0\n\tvpdpbusd %9, %8, %1\n\tvpdpbusd %9, %8, %2\n\tvpdpbusd %9, %8, %3\n\tvpdpbusd %9, %8, %4\n\tvpdpbusd %9, %8, %5\n\tvpdpbusd %9, %8, %6\n\tvpdpbusd %9, %8, %7"
        : "+v"(s0), "+v"(s1), "+v"(s2), "+v"(s3), "+v"(s4), "+v"(s5), "+v"(s6), "+v"(s7)
        : "v"(a), "v"(b));
  }
}

__attribute__((target("avx512f,avx512vnni"), noinline)) void vnni_int16() {
  const __m512i a = _mm512_set1_epi32(0x00030003), b = _mm512_set1_epi32(0x00050005);
  __m512i s0 = a, s1 = a, s2 = a, s3 = a, s4 = a, s5 = a, s6 = a, s7 = a;
  for (int64_t i = 0; i < kRounds; ++i) {
    asm volatile(
        "vpdpwssd %9, %8, %0\n\tvpdpwssd %9, %8, %1\n\tvpdpwssd %9, %8, %2\n\tvpdpwssd %9, %8, %3\n\tvpdpwssd %9, %8, %4\n\tvpdpwssd %9, %8, %5\n\tvpdpwssd %9, %8, %6\n\tvpdpwssd %9, %8, %7"
        : "+v"(s0), "+v"(s1), "+v"(s2), "+v"(s3), "+v"(s4), "+v"(s5), "+v"(s6), "+v"(s7)
        : "v"(a), "v"(b));
  }
}

double gops(int num_threads, void (*run)(), int products) {
  const double seconds = best_time(num_threads, 5, [&](int) { run(); });
  return 2.0 * products * kChains * kRounds * num_threads / seconds / 1e9;
}

}  // namespace

// Bytes a second, in GB/s, that the threads read beyond the caches from huge pages, if there are any.
extern "C" double read_gbps(int num_threads, int64_t size) {
  constexpr size_t kHuge = size_t{2} << 20;
  const size_t share = static_cast<size_t>(size) / num_threads / kHuge * kHuge;
  char* memory = static_cast<char*>(std::aligned_alloc(kHuge, share * num_threads));
  if (memory == nullptr) return 0.0;
  madvise(memory, share * num_threads, MADV_HUGEPAGE);
  for (size_t at = 0; at < share * num_threads; at += 64) memory[at] = 1;
  const double seconds = best_time(num_threads, 5, [&](int t) { read_all(memory + t * share, share); });
  std::free(memory);
  return static_cast<double>(share) * num_threads / seconds / 1e9;
}

// GOP/s of products of bytes and of 16-bit integers with their sums; vnni: by AVX-512 VNNI, else by AVX2.
extern "C" double int8_gops(int num_threads, int vnni) {
  return vnni ? gops(num_threads, vnni_int8, 64) : gops(num_threads, avx2_int8, 32);
}
extern "C" double int16_gops(int num_threads, int vnni) {
  return vnni ? gops(num_threads, vnni_int16, 32) : gops(num_threads, avx2_int16, 16);
}
