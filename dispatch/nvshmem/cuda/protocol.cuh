// How ranks talk through each other's memory: loads and stores that peers see, waits with a deadline, and tickets.
#pragma once

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(16) Vec {
    u32 x, y, z, w;
};

// A flag that orders what the block wrote before (after a barrier of the block) for whoever acquires it.
__device__ __forceinline__ void store_release(u32* at, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ u32 load_acquire(const u32* at) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

// Sixteen bytes as one access that no cache of this SM answers.
__device__ __forceinline__ Vec load_shared_vec(const void* at) {
    Vec v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_shared_vec(void* at, Vec v) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ u64 now_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

// A line: eight bytes of data and, beside each four of them, the epoch. Sixteen bytes arrive whole, so a reader that
// sees the epoch sees the data, and nobody waits for a fence.
__device__ __forceinline__ void store_line(void* at, u32 a, u32 b, u32 epoch) {
    store_shared_vec(at, Vec{a, epoch, b, epoch});
}

__device__ __forceinline__ bool is_of(Vec line, u32 epoch) { return line.y == epoch && line.w == epoch; }

// What a rank keeps to itself for all of its buffers.
struct Status {
    u32 failed;  // a wait of this rank has ended without what it waited for
    u32 alive;   // bit r: rank r takes part
};

// Words of the failure record in the host's memory; behind them one word for each rank, 1 where it was waited for.
enum { RECORD_FAILED, RECORD_PHASE, RECORD_EPOCH, RECORD_RANKS };
enum { PHASE_DISPATCH = 1, PHASE_COMBINE = 2 };

struct Wait {
    Status* status;
    u32* record;
    u64 deadline;  // of globaltimer; 0 for none
    u32 phase;
    u32 epoch;
    bool hopeless;  // a kernel before this one has failed: nothing is waited for any more

    // True when the time is over, which is then on record with the rank that did not come.
    __device__ __forceinline__ bool is_over(int peer) const {
        if (hopeless) {
            return true;
        }
        if (deadline == 0 || now_ns() < deadline) {
            return false;
        }
        volatile u32* words = record;
        words[RECORD_PHASE] = phase;
        words[RECORD_EPOCH] = epoch;
        words[RECORD_RANKS + peer] = 1;
        __threadfence_system();
        words[RECORD_FAILED] = 1;
        *reinterpret_cast<volatile u32*>(&status->failed) = 1;
        return true;
    }

    __device__ __forceinline__ bool for_flag(const u32* flag, int peer) const {
        for (u32 spin = 1;; ++spin) {
            if (load_acquire(flag) == epoch) {
                return true;
            }
            if (spin % 64 == 0 && is_over(peer)) {
                return false;
            }
        }
    }

    __device__ __forceinline__ bool for_line(const void* at, int peer, Vec& line) const {
        for (u32 spin = 1;; ++spin) {
            line = load_shared_vec(at);
            if (is_of(line, epoch)) {
                return true;
            }
            if (spin % 64 == 0 && is_over(peer)) {
                return false;
            }
        }
    }
};

// Work is handed out in order: tickets of one counter, whose upper half is the batch's epoch. Everything that sends has
// a lower ticket than anything that waits, so whoever waits knows that all sending of this rank is in running hands:
// no block waits for one that cannot start, whatever else occupies the GPU.
class Tickets {
public:
    __device__ __forceinline__ Tickets(u64* counter, u64* shared) : counter_(counter), shared_(shared) {
        if (threadIdx.x == 0) {
            *shared_ = atomicAdd(counter_, 1ull);
        }
    }

    // To be called by all threads, with a barrier between the constructor and the first call.
    __device__ __forceinline__ u64 first() {
        const u64 ticket = *shared_;
        draw_ahead();
        return ticket;
    }

    __device__ __forceinline__ u64 next() {
        __syncthreads();
        if (threadIdx.x == 0) {
            *shared_ = ahead_;
        }
        __syncthreads();
        const u64 ticket = *shared_;
        draw_ahead();
        return ticket;
    }

private:
    // The next ticket is on its way while this one is worked on.
    __device__ __forceinline__ void draw_ahead() {
        if (threadIdx.x == 0) {
            ahead_ = atomicAdd(counter_, 1ull);
        }
    }

    u64* counter_;
    u64* shared_;
    u64 ahead_ = 0;
};
