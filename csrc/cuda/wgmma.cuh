// Instructions of sm_90 and sm_90a that CUDA C++ has no names for: warpgroup matrix products, mbarriers, bulk and tensor copies,
// register shares.
//
// A warpgroup is four consecutive warps. Its product D[64 x N] += A[64 x 16] B[16 x N] runs asynchronously: fence, issue,
// commit, wait. A lies in shared memory or in registers, B in shared memory, D in registers. With g = lane / 4, q = lane % 4 and
// w the warp's place in its group a thread holds
//   d[4 i], d[4 i + 1] = D[16 w + g][8 i + 2 q, + 1]     d[4 i + 2], d[4 i + 3] = D[16 w + g + 8][8 i + 2 q, + 1]
//   a[0] = A[16 w + g][2 q, + 1]   a[1] = A[16 w + g + 8][2 q, + 1]   a[2], a[3]: the same rows, columns 8 further
// so that a pair of neighbouring 8-column groups of one product's D, rounded to 16 bits, is the next product's A.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace research_engine::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHasWgmma = true;
#else
constexpr bool kHasWgmma = false;
#endif

// mbarriers and bulk copies are of sm_90 without the "a" already.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHasBulkCopies = true;
#else
constexpr bool kHasBulkCopies = false;
#endif

// Shared-memory operands are atoms of rows of 128 bytes (64 elements), 8 rows to a group of 1,024 bytes, its address a multiple
// of 1,024; the 16-byte chunk c of row r lies at chunk c ^ (r % 8), which is what a tensor copy with a 128-byte swizzle writes.
constexpr int kAtomRow = 128;
constexpr int kAtomGroup = 8 * kAtomRow;

// The 64-bit description of an operand: start address, leading and stride byte offset in units of 16 bytes, swizzle.
//   K along the rows (Q, K of Q K^T)    stride: from one group of 8 rows to the next; the leading offset is not used
//   N along the rows (V of P V)         leading: from one atom of 64 columns to the next; stride: from 8 keys to the next 8
__device__ __forceinline__ uint64_t operand(uint32_t address, int leading_bytes, int stride_bytes) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4) << 32 | uint64_t{1} << 62;
}
// The same operand `bytes` further. The start address has 14 bits of its own: 32-bit arithmetic is enough.
__device__ __forceinline__ uint64_t advance(uint64_t operand, int bytes) {
  return (operand & 0xffffffff00000000u) | static_cast<uint32_t>(static_cast<uint32_t>(operand) + (bytes >> 4));
}

template <typename T, int kN> struct Wgmma;

#define RESEARCH_ENGINE_R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define RESEARCH_ENGINE_R24 RESEARCH_ENGINE_R16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define RESEARCH_ENGINE_R32A                                                                                            \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define RESEARCH_ENGINE_R32B                                                                                             \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60" \
  ",%61,%62,%63"
#define RESEARCH_ENGINE_R32C                                                                                             \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92" \
  ",%93,%94,%95"
#define RESEARCH_ENGINE_R32D                                                                                              \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119" \
  ",%120,%121,%122,%123,%124,%125,%126,%127"
#define RESEARCH_ENGINE_F8(i)                                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define RESEARCH_ENGINE_F32(i) \
  RESEARCH_ENGINE_F8(i), RESEARCH_ENGINE_F8(i + 8), RESEARCH_ENGINE_F8(i + 16), RESEARCH_ENGINE_F8(i + 24)
#define RESEARCH_ENGINE_D16() RESEARCH_ENGINE_F8(0), RESEARCH_ENGINE_F8(8)
#define RESEARCH_ENGINE_D24() RESEARCH_ENGINE_D16(), RESEARCH_ENGINE_F8(16)
#define RESEARCH_ENGINE_D32() RESEARCH_ENGINE_F32(0)
#define RESEARCH_ENGINE_D64() RESEARCH_ENGINE_D32(), RESEARCH_ENGINE_F32(32)
#define RESEARCH_ENGINE_D96() RESEARCH_ENGINE_D64(), RESEARCH_ENGINE_F32(64)
#define RESEARCH_ENGINE_D128() RESEARCH_ENGINE_D96(), RESEARCH_ENGINE_F32(96)

// I0 to I4 name the operands after the N / 2 accumulators.
//   shared_shared     D = A B, or D += A B; K along the rows of both
//   registers_shared  D += A B; N along the rows of B
#define RESEARCH_ENGINE_WGMMA(TYPE, NAME, N, REGISTERS, ACCUMULATORS, I0, I1, I2, I3, I4)                                 \
  template <> struct Wgmma<TYPE, N> {                                                                                     \
    static __device__ __forceinline__ void shared_shared(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " I2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." \
                   NAME " {" REGISTERS "}, " I0 ", " I1 ", p, 1, 1, 0, 0;\n}"                                             \
                   : ACCUMULATORS()                                                                                       \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                                  \
    }                                                                                                                     \
    static __device__ __forceinline__ void registers_shared(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {       \
      asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME \
                   " {" REGISTERS "}, {" I0 ", " I1 ", " I2 ", " I3 "}, " I4 ", p, 1, 1, 1;\n}"                           \
                   : ACCUMULATORS()                                                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                 \
    }                                                                                                                     \
  };
#define RESEARCH_ENGINE_WGMMA_TYPES(...)                    \
  RESEARCH_ENGINE_WGMMA(__nv_bfloat16, "bf16", __VA_ARGS__) \
  RESEARCH_ENGINE_WGMMA(__half, "f16", __VA_ARGS__)
RESEARCH_ENGINE_WGMMA_TYPES(32, RESEARCH_ENGINE_R16, RESEARCH_ENGINE_D16, "%16", "%17", "%18", "%19", "%20")
RESEARCH_ENGINE_WGMMA_TYPES(48, RESEARCH_ENGINE_R24, RESEARCH_ENGINE_D24, "%24", "%25", "%26", "%27", "%28")
RESEARCH_ENGINE_WGMMA_TYPES(64, RESEARCH_ENGINE_R32A, RESEARCH_ENGINE_D32, "%32", "%33", "%34", "%35", "%36")
RESEARCH_ENGINE_WGMMA_TYPES(128, RESEARCH_ENGINE_R32A RESEARCH_ENGINE_R32B, RESEARCH_ENGINE_D64, "%64", "%65", "%66", "%67",
                            "%68")
RESEARCH_ENGINE_WGMMA_TYPES(192, RESEARCH_ENGINE_R32A RESEARCH_ENGINE_R32B RESEARCH_ENGINE_R32C, RESEARCH_ENGINE_D96, "%96",
                            "%97", "%98", "%99", "%100")
RESEARCH_ENGINE_WGMMA_TYPES(256, RESEARCH_ENGINE_R32A RESEARCH_ENGINE_R32B RESEARCH_ENGINE_R32C RESEARCH_ENGINE_R32D,
                            RESEARCH_ENGINE_D128, "%128", "%129", "%130", "%131", "%132")
#undef RESEARCH_ENGINE_WGMMA_TYPES
#undef RESEARCH_ENGINE_WGMMA
#undef RESEARCH_ENGINE_D128
#undef RESEARCH_ENGINE_D96
#undef RESEARCH_ENGINE_D64
#undef RESEARCH_ENGINE_D32
#undef RESEARCH_ENGINE_D24
#undef RESEARCH_ENGINE_D16
#undef RESEARCH_ENGINE_F32
#undef RESEARCH_ENGINE_F8
#undef RESEARCH_ENGINE_R32D
#undef RESEARCH_ENGINE_R32C
#undef RESEARCH_ENGINE_R32B
#undef RESEARCH_ENGINE_R32A
#undef RESEARCH_ENGINE_R24
#undef RESEARCH_ENGINE_R16

// Orders register and shared-memory writes of this warpgroup before the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until no more than kPending committed groups are under way.
template <int kPending> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Pins the registers of products to this place in the program: the compiler, to which a product is an instruction like any other,
// must not read accumulators before the wait, nor write accumulators or operands after the fence.
template <int kCount> __device__ __forceinline__ void pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
template <int kCount> __device__ __forceinline__ void pin(uint32_t (&values)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+r"(values[i][0]), "+r"(values[i][1]), "+r"(values[i][2]), "+r"(values[i][3])::"memory");
  }
}

// A value that is the same in all lanes, in a register of the warp instead of one of each lane: descriptions of operands and
// addresses of copies have to be there, and each costs a move of a dozen cycles from elsewhere.
__device__ __forceinline__ uint32_t uniform(uint32_t value) { return __shfl_sync(0xffffffffu, value, 0); }

// mbarriers, by their shared-memory address. A phase ends when all arrivals and all announced bytes are there; a wait for
// `parity` returns once the phase of that parity is over (on a fresh barrier, a wait for parity 1 returns at once).
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes the initialised barriers known to the copy engine; __syncthreads() must follow.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// At a barrier of another block of the cluster, whose address cluster_address() gives.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// 16 bytes into the shared memory of another block of the cluster; they count towards the phase of a barrier there.
__device__ __forceinline__ void store_async(uint32_t address, float4 value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
               "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// Shared memory written by ordinary stores or cp.async becomes visible to the products and the copy engine.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void clear_shared_16(uint32_t address) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}
// One 16-byte store, where the compiler would rather gather no registers and make four.
__device__ __forceinline__ void store_global_16(void* target, const uint32_t (&words)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Copies of a run of bytes by the copy engine, all of it aligned to 16 bytes. To shared memory: the bytes count towards the
// barrier's phase. From there: a thread's stores of a commit form a group.
__device__ __forceinline__ void bulk_load(uint32_t destination, const void* source, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void bulk_store(void* destination, uint32_t source, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all of this thread's groups but the last kPending have read shared memory, which may be written again then.
template <int kPending> __device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until all of this thread's groups are done.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// One box of a 2-dimensional tensor map to shared memory, with an L2 policy (mma.cuh) or the cache's own; its bytes count towards the
// barrier's phase.
__device__ __forceinline__ void tensor_copy(uint32_t destination, const CUtensorMap* map, uint32_t barrier, int x0, int x1) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
                   destination),
               "l"(map), "r"(barrier), "r"(x0), "r"(x1)
               : "memory");
}
__device__ __forceinline__ void tensor_copy(uint32_t destination, const CUtensorMap* map, uint32_t barrier, int x0, int x1,
                                            uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(
          destination),
      "l"(map), "r"(barrier), "r"(x0), "r"(x1), "l"(policy)
      : "memory");
}
// One box of a 4- or 5-dimensional tensor map to shared memory; its bytes count towards the barrier's phase.
__device__ __forceinline__ void tensor_copy(uint32_t destination, const CUtensorMap* map, uint32_t barrier, int x0, int x1,
                                            int x2, int x3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
          destination),
      "l"(map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}
__device__ __forceinline__ void tensor_copy(uint32_t destination, const CUtensorMap* map, uint32_t barrier, int x0, int x1,
                                            int x2, int x3, int x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(
          destination),
      "l"(map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}
// Into L2 alone.
__device__ __forceinline__ void prefetch_tensor(const CUtensorMap* map, int x0, int x1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(x0), "r"(x1) : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Barriers of the thread block by number (0 is __syncthreads): `threads` counts those that wait and those that only arrive.
__device__ __forceinline__ void block_barrier_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void block_barrier_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Moves registers between the warpgroups of a block; every warp of the group executes it.
template <int kRegisters> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace research_engine::cuda
