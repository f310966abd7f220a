// What steps took and gave, for whoever waits for them. XLA tells its callers that a program is done after what it had
// queued behind, if it has one thread (seen with jaxlib 0.10.2): a token would leave one step late. So the kernel that
// samples says it itself.
#pragma once

#include <cstdint>

namespace twinjet {

int64_t now_ns();

// Counts a kernel towards the step that runs. By the holder of a KernelScope alone, as the next.
void count_kernel(int64_t started_ns, int64_t ended_ns);

// The running step is over and has given `table`, which is copied.
void end_step(int32_t tag, const int32_t* table, int64_t size);

}  // namespace twinjet

// Waits until the step with this tag has ended, `timeout_us` at most. Fills in when its first kernel began and its last
// one ended (steady clock) and for how long its kernels ran, in nanoseconds, and what it gave, up to `room` numbers.
// Returns how many numbers it gave, -1: it has not ended. A step is told of once, and forgotten after some hundred others.
extern "C" __attribute__((visibility("default"))) int64_t twinjet_wait_step(int32_t tag, int64_t timeout_us,
                                                                           int64_t* started_ended_busy, int32_t* table,
                                                                           int64_t room);
