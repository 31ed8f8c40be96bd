// Copies that complete on mbarriers, and packets from block to block.
#pragma once
#include "../device.cuh"

namespace pk::persist {

__device__ __forceinline__ void barrier_init(uint32_t at, uint32_t count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory"); }
__device__ __forceinline__ void barrier_expect(uint32_t at, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory"); }
// Arrives once the warp's loads that `bits` was made from have been carried out. A load from shared memory may still be under way when an arrival
// behind it has been seen, and a bulk copy is quick enough to overtake it (LOG.md, P9).
__device__ __forceinline__ void barrier_arrive_after(uint32_t at, uint32_t bits) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0x7fc12345;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n@!p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(at), "r"(bits) : "memory");
}
__device__ __forceinline__ bool barrier_try(uint32_t at, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done) : "r"(at), "r"(parity) : "memory");
    return done != 0;
}
__device__ __forceinline__ void barrier_wait(uint32_t at, uint32_t parity) {
    while (!barrier_try(at, parity)) {
    }
}
__device__ __forceinline__ uint64_t read_once_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void copy_bulk(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier, uint64_t policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
}
// x: in words of four bytes.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap *map, int x, int y, uint32_t barrier, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y),
                 "l"(policy)
                 : "memory");
}
__device__ __forceinline__ void prefetch_box(const CUtensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// All threads that multiply; all that write.
__device__ __forceinline__ void join_consumers(int n_threads) { asm volatile("bar.sync 1, %0;" ::"r"(n_threads) : "memory"); }
__device__ __forceinline__ void join_writers(int n_threads) { asm volatile("bar.sync 2, %0;" ::"r"(n_threads) : "memory"); }

// A packet is one 64-bit access: its data and its epoch arrive together. (x, z): data, (y, w): epochs.
__device__ __forceinline__ uint4 load_packets2(const void *p) {
    uint64_t a, b;
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0,%1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
    return make_uint4(static_cast<uint32_t>(a), static_cast<uint32_t>(a >> 32), static_cast<uint32_t>(b), static_cast<uint32_t>(b >> 32));
}
// Two packets, asked for unless both are there.
__device__ __forceinline__ void load_packets2_again(uint4 &v, const void *p, uint32_t epoch) {
    uint64_t a = static_cast<uint64_t>(v.y) << 32 | v.x, b = static_cast<uint64_t>(v.w) << 32 | v.z;
    const uint32_t missing = (v.y ^ epoch) | (v.w ^ epoch);
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p ld.relaxed.gpu.global.v2.b64 {%0,%1}, [%2];\n}" : "+l"(a), "+l"(b) : "l"(p), "r"(missing) : "memory");
    v = make_uint4(static_cast<uint32_t>(a), static_cast<uint32_t>(a >> 32), static_cast<uint32_t>(b), static_cast<uint32_t>(b >> 32));
}
__device__ __forceinline__ uint2 load_packet(const void *p) {
    uint64_t a;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(a) : "l"(p) : "memory");
    return make_uint2(static_cast<uint32_t>(a), static_cast<uint32_t>(a >> 32));
}
// By a warp: until one of the packets that a few lanes ask for has come. at: of its epoch.
__device__ __forceinline__ void await_any(const uint8_t *at, uint32_t epoch, int lane) {
    auto ask = [&] {
        uint32_t v = ~epoch;
        if ((lane & 3) == 0) asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
        return v;
    };
    uint32_t found = ask();
    while (!__any_sync(~0u, found == epoch)) found = ask();
}
__device__ __forceinline__ void store_packet(void *p, uint32_t bits, uint32_t epoch) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(p), "l"(static_cast<uint64_t>(epoch) << 32 | bits) : "memory");
}
__device__ __forceinline__ float2 load_shared2(uint32_t from) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
    return v;
}
__device__ __forceinline__ void store_shared(uint32_t to, uint32_t v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(v) : "memory"); }

// Sixteen bytes that arrive together, the last four of them the epoch. Asked for unless they have come.
__device__ __forceinline__ void load_quad_again(uint4 &v, const void *p, uint32_t epoch) {
    uint64_t a = static_cast<uint64_t>(v.y) << 32 | v.x, b = static_cast<uint64_t>(v.w) << 32 | v.z;
    asm volatile("{\n.reg .pred p;\n.reg .b128 q;\nmov.b128 q, {%0,%1};\nsetp.ne.u32 p, %3, %4;\n@p ld.relaxed.gpu.global.b128 q, [%2];\nmov.b128 {%0,%1}, q;\n}" : "+l"(a), "+l"(b) : "l"(p), "r"(v.w), "r"(epoch) : "memory");
    v = make_uint4(static_cast<uint32_t>(a), static_cast<uint32_t>(a >> 32), static_cast<uint32_t>(b), static_cast<uint32_t>(b >> 32));
}
__device__ __forceinline__ void store_quad(void *p, uint4 v) {
    asm volatile("{\n.reg .b128 q;\nmov.b128 q, {%1,%2};\nst.relaxed.gpu.global.b128 [%0], q;\n}" ::"l"(p), "l"(static_cast<uint64_t>(v.y) << 32 | v.x), "l"(static_cast<uint64_t>(v.w) << 32 | v.z) : "memory");
}
// Two neighbours, each a packet of its own.
__device__ __forceinline__ void store_packets2(void *p, uint32_t first, uint32_t second, uint32_t epoch) {
    asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1,%2};" ::"l"(p), "l"(static_cast<uint64_t>(epoch) << 32 | first), "l"(static_cast<uint64_t>(epoch) << 32 | second) : "memory");
}

// threadIdx.x, read anew: what is worked out from it is not kept in registers through phases that do not want it.
__device__ __forceinline__ int thread_here() {
    int i;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));
    return i;
}

// A phase of a barrier; at: its address, 0 for none.
struct Met {
    uint32_t at, parity;
    __device__ __forceinline__ void await() const {
        if (at) barrier_wait(at, parity);
    }
};

// A place in a ring of slots.
struct Slot {
    int at = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance(int n) {
        if (++at == n) {
            at = 0;
            parity ^= 1;
        }
    }
};

// Into the shared memory of the other block of a cluster of two, whose barrier counts the bytes. at, barrier: where they are in this block's.
__device__ __forceinline__ uint32_t other_block(uint32_t at) {
    uint32_t rank, there;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank ^ 1));
    return there;
}
__device__ __forceinline__ void send_other(uint32_t at, float2 v, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(other_block(at)), "f"(v.x), "f"(v.y), "r"(other_block(barrier)) : "memory");
}
__device__ __forceinline__ void join_cluster() { asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory"); }

// What a multiplying warp carries from phase to phase: its ring, and how many groups of sums it has left.
struct Taker {
    const uint8_t *ring;
    uint32_t full, empty;
    int n_slots, slot_bytes;
    Slot slot;
    uint32_t n_groups = 0;
    // Barriers of what the other block of the cluster sends, what it sends (phase.h), and the barriers' parities, a bit each.
    uint32_t paired, exchange, pair_parity = 0;
    // The slot `ahead` of the next one.
    __device__ __forceinline__ int index(int ahead) const { return slot.at + ahead < n_slots ? slot.at + ahead : slot.at + ahead - n_slots; }
    __device__ __forceinline__ const uint8_t *slot_at(int ahead) const { return ring + index(ahead) * slot_bytes; }
    __device__ __forceinline__ void await(int ahead) const { barrier_wait(full + 8 * index(ahead), slot.at + ahead < n_slots ? slot.parity : slot.parity ^ 1); }
    // By a whole warp: the next n slots, of which its lanes look at one each.
    __device__ __forceinline__ void await_all(int n, int lane) const {
        await(lane < n ? lane : 0);
        __syncwarp();
    }
    // By a warp that has read the next slots and met after that.
    __device__ __forceinline__ void release_all(int n, int lane, uint32_t used) {
        if (lane < n) barrier_arrive_after(empty + 8 * index(lane), used);
        if ((slot.at += n) >= n_slots) {
            slot.at -= n_slots;
            slot.parity ^= 1;
        }
    }
    // By a warp that has read the next slot and met after that; used: made from everything that was read.
    __device__ __forceinline__ void release(int lane, uint32_t used) {
        if (lane == 0) barrier_arrive_after(empty + 8 * slot.at, used);
        slot.advance(n_slots);
    }
};

}  // namespace pk::persist
