// The kernels' own threads, scratch memory and floating-point mode. Knows nothing of models.
//
// XLA may call a kernel from any of its threads, so nothing here is kept per calling thread: a kernel holds a
// `KernelScope`, which owns the pool until it ends.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace twinjet {

// Flush-to-zero and denormals-are-zero while it lives, in this thread only.
class FlushDenormals {
 public:
  FlushDenormals();
  ~FlushDenormals();
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned saved_;
};

// Workers that spin briefly for the next job and then sleep. Tasks are claimed one by one from a counter, so a thread
// that loses its core delays one task, and a worker that never woke is not waited for. What a task computes must not
// depend on who runs it.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // The caller counts as one.
  int num_threads() const { return num_threads_; }

  // fn(int64_t task, int thread) for all tasks in [0, num_tasks); thread in [0, num_threads). Returns when all are
  // done. The caller takes part. Not reentrant: a task must not call it.
  template <class Fn>
  void run(int64_t num_tasks, Fn&& fn) {
    using F = std::remove_reference_t<Fn>;
    if (num_tasks <= 0) return;
    if (num_tasks == 1 || num_threads_ == 1) {
      for (int64_t task = 0; task < num_tasks; ++task) fn(task, 0);
      return;
    }
    run_job(num_tasks, [](void* f, int64_t task, int thread) { (*static_cast<F*>(f))(task, thread); },
            const_cast<void*>(static_cast<const void*>(&fn)));
  }

  // What is likely to be read next. Workers that wait for a job fetch it into their caches: between two kernels memory
  // would be idle otherwise. Any address will do, nothing is read.
  void read_ahead(const void* begin, int64_t size);

 private:
  using Call = void (*)(void* fn, int64_t task, int thread);

  void run_job(int64_t num_tasks, Call call, void* fn);
  void claim_tasks(int thread);
  void work(int thread);
  bool fetch_ahead();
  bool wait_for_job(uint64_t last_epoch, uint64_t* joined);

  const int num_threads_;
  Call call_ = nullptr;
  void* fn_ = nullptr;
  int64_t num_tasks_ = 0;
  // Bits 0-15: workers inside the job; bit 16: open to join; bits 32-63: job number.
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int64_t> next_task_{0};
  alignas(64) std::atomic<uint32_t> wake_word_{0};
  // Addresses; the first is claimed piece by piece.
  alignas(64) std::atomic<uintptr_t> ahead_{0};
  std::atomic<uintptr_t> ahead_end_{0};
  std::atomic<int> num_sleepers_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
};

// Memory for one kernel call, kept between calls so that nothing is mapped and faulted in anew.
class Scratch {
 public:
  ~Scratch();
  // Uninitialised, 64-byte aligned, valid until the scope ends.
  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(static_cast<size_t>(count) * sizeof(T)));
  }
  void reset();

 private:
  void* take_bytes(size_t size);
  struct Chunk {
    char* memory;
    size_t size;
  };
  std::vector<Chunk> chunks_;
  size_t used_ = 0;  // of the last chunk
};

// Whether a kernel's time counts as a step's.
enum class Clocked { kStep, kNot };

// What a kernel holds while it runs: the pool and the scratch, alone, with denormals flushed.
class KernelScope {
 public:
  explicit KernelScope(Clocked clocked = Clocked::kStep);
  ~KernelScope();
  KernelScope(const KernelScope&) = delete;
  KernelScope& operator=(const KernelScope&) = delete;

  // This kernel is its step's last one, and leaves a table, which must outlive the scope.
  void ends_step(int32_t tag, const int32_t* table, int64_t size) {
    tag_ = tag;
    table_ = table;
    table_size_ = size;
  }

  ThreadPool& pool() const { return *pool_; }
  Scratch& scratch() const { return *scratch_; }

  // Runs over [0, count) in ranges of up to `grain`: fn(begin, end, thread).
  template <class Fn>
  void for_ranges(int64_t count, int64_t grain, Fn&& fn) const {
    const int64_t num_tasks = (count + grain - 1) / grain;
    pool_->run(num_tasks, [&](int64_t task, int thread) {
      const int64_t begin = task * grain;
      fn(begin, begin + grain < count ? begin + grain : count, thread);
    });
  }

 private:
  std::unique_lock<std::mutex> lock_;
  const Clocked clocked_;
  int64_t started_ns_;
  int32_t tag_ = 0;
  const int32_t* table_ = nullptr;
  int64_t table_size_ = 0;
  FlushDenormals flush_;
  ThreadPool* pool_;
  Scratch* scratch_;
};

}  // namespace twinjet

// Sets the number of kernel threads (the caller of a kernel counts as one); to be called before the first kernel.
// Calling it again replaces the threads.
extern "C" __attribute__((visibility("default"))) void twinjet_init(int num_threads);
