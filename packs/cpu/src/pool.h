// Thread pool of a context: own threads, the caller is thread 0. Workers spin for a bounded time, then park.
//
// Work is handed out in chunks that threads claim; the caller waits only for chunks that somebody has claimed, so a
// worker that the system has not scheduled delays nothing. Nothing is allocated after construction.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace pk {

class Pool {
   public:
    // n_threads 0: one per processor of the affinity mask.
    explicit Pool(int32_t n_threads);
    ~Pool();
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    // Those that work: all but what `limit` has left out.
    int32_t n_threads() const { return n_active_.load(std::memory_order_relaxed); }

    int32_t n_all() const { return n_threads_; }

    // From the next job on only so many threads work, or all (0). Not while a job runs.
    void limit(int32_t n_threads);

    // body(begin, end, thread) over [0, n_items), in pieces of at most `grain` items; thread in [0, n_threads).
    // Returns when every piece is done (what the pieces wrote is visible). Not reentrant: one caller at a time.
    template <class Body>
    void parallel_for(int64_t n_items, int64_t grain, const Body &body) {
        if (n_items <= 0) return;
        if (grain < 1) grain = 1;
        if (n_threads() == 1 || n_items <= grain) {
            body(int64_t{0}, n_items, 0);
            return;
        }
        auto call = [](const void *context, int64_t begin, int64_t end, int32_t thread) {
            (*static_cast<const Body *>(context))(begin, end, thread);
        };
        run(n_items, grain, call, &body);
    }

    // Items per piece so that each thread gets about `pieces` pieces.
    int64_t grain(int64_t n_items, int64_t pieces = 4) const {
        int64_t n = n_threads() * pieces;
        return (n_items + n - 1) / n;
    }

   private:
    using Call = void (*)(const void *, int64_t, int64_t, int32_t);
    void run(int64_t n_items, int64_t grain, Call call, const void *context);
    bool work_once(int32_t thread);
    void worker(int32_t thread);
    void wake();
    void wait_done(uint32_t n_pieces);

    // ticket: high 32 bits the job number, low 32 bits the pieces that nobody has claimed yet. The fields of the job
    // may be read only after a piece was claimed: until that piece is done no other job can start.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<uint32_t> done_{0};
    std::atomic<uint32_t> caller_waits_{0};
    alignas(64) std::atomic<uint32_t> signal_{0};  // futex word of parked workers
    std::atomic<int32_t> n_parked_{0};
    alignas(64) std::atomic<uint32_t> limits_{0};  // futex word of workers that are left out: how often that has changed
    std::atomic<bool> stop_{false};
    alignas(64) Call call_ = nullptr;
    const void *context_ = nullptr;
    int64_t n_items_ = 0, grain_ = 0;
    uint32_t n_pieces_ = 0;

    int32_t n_threads_ = 1;
    std::atomic<int32_t> n_active_{1};
    int64_t spin_ticks_ = 0;
    std::vector<std::thread> threads_;
};

}  // namespace pk
