#include "threads.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#include <chrono>
#include <climits>
#include <cstdlib>
#include <new>

#include "steps.h"

namespace twinjet {
namespace {

// AddressSanitizer knows no pieces of one allocation, so it is told which bytes of the scratch are nobody's: all that
// is not taken, and a gap behind each piece.
#ifdef __SANITIZE_ADDRESS__
constexpr size_t kGap = 64;
void close_bytes(void* memory, size_t size) { ASAN_POISON_MEMORY_REGION(memory, size); }
void open_bytes(void* memory, size_t size) { ASAN_UNPOISON_MEMORY_REGION(memory, size); }
#else
constexpr size_t kGap = 0;
void close_bytes(void*, size_t) {}
void open_bytes(void*, size_t) {}
#endif

constexpr uint64_t kOpen = uint64_t{1} << 16;
constexpr uint64_t kActive = kOpen - 1;
// Longer than the gap between two kernels of a step, shorter than the gap between steps.
constexpr std::chrono::microseconds kSpin{40};
// Where the system does not interrupt a thread for one that was woken (PREEMPT_NONE), Python would wait for a clock tick, up
// to 4 ms, to read a step's tokens. So every kernel yields as it begins, and its workers while they wait, which is when
// nobody waits for them.
constexpr int kYieldSpins = 16;
// Of memory, between two looks for a job.
constexpr uintptr_t kFetchBytes = 512;
constexpr unsigned kFlushBits = 0x8040;  // FTZ and DAZ

uint64_t epoch_of(uint64_t state) { return state >> 32; }

void futex_wait(std::atomic<uint32_t>* word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

struct Context {
  std::mutex mutex;
  std::unique_ptr<ThreadPool> pool;
  Scratch scratch;
};

// Never destroyed: threads of XLA may still run when the process exits.
Context& context() {
  static Context* context = new Context;
  return *context;
}

}  // namespace

FlushDenormals::FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlushBits); }

FlushDenormals::~FlushDenormals() { _mm_setcsr(saved_); }

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads) {
  for (int thread = 1; thread < num_threads_; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

ThreadPool::~ThreadPool() {
  stopping_.store(true, std::memory_order_seq_cst);
  wake_word_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(&wake_word_);
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run_job(int64_t num_tasks, Call call, void* fn) {
  // Closed, and nobody inside: the fields are the caller's.
  call_ = call;
  fn_ = fn;
  num_tasks_ = num_tasks;
  next_task_.store(0, std::memory_order_relaxed);
  const uint64_t epoch = epoch_of(state_.load(std::memory_order_relaxed)) + 1;
  state_.store((epoch << 32) | kOpen, std::memory_order_seq_cst);
  if (num_sleepers_.load(std::memory_order_seq_cst) > 0) {
    wake_word_.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(&wake_word_);
  }
  claim_tasks(0);
  state_.fetch_and(~kOpen, std::memory_order_acq_rel);
  for (int spins = 0; (state_.load(std::memory_order_acquire) & kActive) != 0; ++spins) {
    if (spins < 4096) {
      _mm_pause();
    } else {
      sched_yield();  // a worker lost its core in the middle of a task
    }
  }
}

void ThreadPool::read_ahead(const void* begin, int64_t size) {
  // In this order a worker that sees one and not yet the other fetches too little or nothing.
  ahead_end_.store(0, std::memory_order_relaxed);
  ahead_.store(reinterpret_cast<uintptr_t>(begin), std::memory_order_release);
  ahead_end_.store(reinterpret_cast<uintptr_t>(begin) + static_cast<uintptr_t>(size), std::memory_order_release);
}

// False: there is nothing to fetch.
bool ThreadPool::fetch_ahead() {
  const uintptr_t end = ahead_end_.load(std::memory_order_acquire);
  if (ahead_.load(std::memory_order_relaxed) >= end) return false;
  const uintptr_t from = ahead_.fetch_add(kFetchBytes, std::memory_order_relaxed);
  for (uintptr_t at = from; at < from + kFetchBytes; at += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1);
  }
  return true;
}

void ThreadPool::claim_tasks(int thread) {
  for (;;) {
    const int64_t task = next_task_.fetch_add(1, std::memory_order_relaxed);
    if (task >= num_tasks_) return;
    call_(fn_, task, thread);
  }
}

// Joins the next job. False: the pool is stopping.
bool ThreadPool::wait_for_job(uint64_t last_epoch, uint64_t* joined) {
  auto spin_until = std::chrono::steady_clock::now() + kSpin;
  for (int spins = 1;; ++spins) {
    uint64_t state = state_.load(std::memory_order_acquire);
    if ((state & kOpen) != 0 && epoch_of(state) != last_epoch) {
      if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
        *joined = epoch_of(state);
        return true;
      }
      continue;
    }
    if (stopping_.load(std::memory_order_acquire)) return false;
    if (fetch_ahead()) continue;
    _mm_pause();
    if (spins % kYieldSpins == 0) sched_yield();
    if (spins % 64 != 0 || std::chrono::steady_clock::now() < spin_until) continue;
    const uint32_t seen = wake_word_.load(std::memory_order_seq_cst);
    num_sleepers_.fetch_add(1, std::memory_order_seq_cst);
    state = state_.load(std::memory_order_seq_cst);
    const bool nothing = (state & kOpen) == 0 || epoch_of(state) == last_epoch;
    if (nothing && !stopping_.load(std::memory_order_seq_cst)) futex_wait(&wake_word_, seen);
    num_sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    spin_until = std::chrono::steady_clock::now() + kSpin;
  }
}

void ThreadPool::work(int thread) {
  FlushDenormals flush;
  uint64_t epoch = 0;
  while (wait_for_job(epoch, &epoch)) {
    claim_tasks(thread);
    state_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

Scratch::~Scratch() {
  for (const Chunk& chunk : chunks_) std::free(chunk.memory);
}

void* Scratch::take_bytes(size_t size) {
  const size_t asked = size;
  size = (size + 63) / 64 * 64 + kGap;
  if (chunks_.empty() || used_ + size > chunks_.back().size) {
    constexpr size_t kUnit = size_t{2} << 20;
    const size_t grown = chunks_.empty() ? kUnit : 2 * chunks_.back().size;
    const size_t chunk_size = ((size > grown ? size : grown) + kUnit - 1) / kUnit * kUnit;
    char* memory = static_cast<char*>(std::aligned_alloc(kUnit, chunk_size));
    if (memory == nullptr) throw std::bad_alloc();
    madvise(memory, chunk_size, MADV_HUGEPAGE);
    close_bytes(memory, chunk_size);
    chunks_.push_back({memory, chunk_size});
    used_ = 0;
  }
  void* taken = chunks_.back().memory + used_;
  used_ += size;
  open_bytes(taken, asked);
  return taken;
}

void Scratch::reset() {
  // The largest chunk is the last; a call that needed several gets all it needs from it next time, or soon.
  while (chunks_.size() > 1) {
    std::free(chunks_.front().memory);
    chunks_.erase(chunks_.begin());
  }
  if (!chunks_.empty()) close_bytes(chunks_.back().memory, used_);
  used_ = 0;
}

KernelScope::KernelScope(Clocked clocked)
    : lock_(context().mutex), clocked_(clocked), started_ns_(now_ns()), pool_(nullptr), scratch_(&context().scratch) {
  sched_yield();
  if (context().pool == nullptr) context().pool = std::make_unique<ThreadPool>(1);
  pool_ = context().pool.get();
}

KernelScope::~KernelScope() {
  scratch_->reset();
  if (clocked_ == Clocked::kNot) return;
  count_kernel(started_ns_, now_ns());
  if (table_ != nullptr) end_step(tag_, table_, table_size_);
}

}  // namespace twinjet

extern "C" void twinjet_init(int num_threads) {
  twinjet::Context& context = twinjet::context();
  std::lock_guard<std::mutex> lock(context.mutex);
  if (context.pool == nullptr || context.pool->num_threads() != num_threads) {
    context.pool = std::make_unique<twinjet::ThreadPool>(num_threads);
  }
}
