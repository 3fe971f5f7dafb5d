#ifndef MOERL_LIBS_EP_ROW_KERNEL_H_
#define MOERL_LIBS_EP_ROW_KERNEL_H_

// Private to the library. A function so marked is compiled for several instruction sets, of which the loader picks (not
// under sanitizers, which start after the loader). Contraction is off for the whole tree: no set fuses a multiply and
// an add, so the bits are the same.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define MOERL_ROW_KERNEL __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))
#else
#define MOERL_ROW_KERNEL
#endif

#endif  // MOERL_LIBS_EP_ROW_KERNEL_H_
