// The fake device of process_split.py: one step that keeps two threads busy and stamps itself.
//
// A real XLA FFI handler, so that JAX's dispatch, donation and release of the GIL are the real ones. The
// state is donated and updated in place by both threads. Stamps are read inside the kernel.

#include <pthread.h>
#include <time.h>

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kStampWords = 6;  // three int64: start, end, CPU time of both threads

int64_t NowNs(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

// Half of a step: touches state[0, n) until `clock` reaches `deadline_ns`. Returns the CPU time it took.
int64_t Spin(float* state, int64_t n, clockid_t clock, int64_t deadline_ns) {
  const int64_t cpu = NowNs(CLOCK_THREAD_CPUTIME_ID);
  constexpr int64_t kPiece = 2048;  // floats between two looks at the clock: about 1 us
  for (int64_t at = 0; NowNs(clock) < deadline_ns; at = (at + kPiece < n) ? at + kPiece : 0) {
    const int64_t end = at + kPiece < n ? at + kPiece : n;
    for (int64_t i = at; i < end; ++i) state[i] = state[i] * 0.999f + 1.0f;
  }
  return NowNs(CLOCK_THREAD_CPUTIME_ID) - cpu;
}

// The second thread of the device; sleeps between steps, as a kernel thread pool does.
class SecondThread {
 public:
  SecondThread() : thread_([this] { Loop(); }) { thread_.detach(); }

  void Start(float* state, int64_t n, bool cpu_clock, int64_t deadline_ns, int64_t duration_ns) {
    std::lock_guard<std::mutex> lock(mutex_);
    state_ = state, n_ = n, cpu_clock_ = cpu_clock, deadline_ns_ = deadline_ns, duration_ns_ = duration_ns;
    busy_ = true;
    changed_.notify_all();
  }

  int64_t Join() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return !busy_; });
    return cpu_ns_;
  }

 private:
  void Loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return busy_; });
      lock.unlock();
      const int64_t cpu = cpu_clock_ ? Spin(state_, n_, CLOCK_THREAD_CPUTIME_ID,
                                            NowNs(CLOCK_THREAD_CPUTIME_ID) + duration_ns_)
                                     : Spin(state_, n_, CLOCK_MONOTONIC, deadline_ns_);
      lock.lock();
      cpu_ns_ = cpu;
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool busy_ = false;
  float* state_ = nullptr;
  int64_t n_ = 0;
  bool cpu_clock_ = false;
  int64_t deadline_ns_ = 0, duration_ns_ = 0, cpu_ns_ = 0;
  std::thread thread_;
};

// plan: int32 [step_us, cpu_clock, step_id]. out: int32 [rows tokens, kStampWords].
// `state_out` is the donated input's own memory.
ffi::Error FakeStep(ffi::Buffer<ffi::F32> /*state_in*/, ffi::Buffer<ffi::S32> plan, ffi::ResultBuffer<ffi::F32> state_out,
                    ffi::ResultBuffer<ffi::S32> out) {
  const int64_t start_ns = NowNs(CLOCK_MONOTONIC);
  static SecondThread* second = new SecondThread;  // never destroyed: it outlives the interpreter's teardown
  const int64_t duration_ns = int64_t{plan.typed_data()[0]} * 1000;
  const bool cpu_clock = plan.typed_data()[1] != 0;
  const int64_t n = static_cast<int64_t>(state_out->element_count());
  float* state = state_out->typed_data();
  second->Start(state + n / 2, n - n / 2, cpu_clock, start_ns + duration_ns, duration_ns);
  const clockid_t clock = cpu_clock ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
  int64_t cpu_ns = Spin(state, n / 2, clock, (cpu_clock ? NowNs(clock) : start_ns) + duration_ns);
  cpu_ns += second->Join();

  const int64_t rows = static_cast<int64_t>(out->element_count()) - kStampWords;
  for (int64_t row = 0; row < rows; ++row) {
    out->typed_data()[row] = static_cast<int32_t>((plan.typed_data()[2] * 31 + row) % 50000);
  }
  const int64_t stamps[3] = {start_ns, NowNs(CLOCK_MONOTONIC), cpu_ns};
  std::memcpy(out->typed_data() + rows, stamps, sizeof(stamps));
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ProcessSplitStep, FakeStep,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());
