// Says whether this processor runs the kernels; compiled without their instructions.
extern "C" __attribute__((visibility("default"))) int twinjet_cpu_supported() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return 0;
#endif
}
