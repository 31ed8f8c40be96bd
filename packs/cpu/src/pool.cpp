// Thread pool: pieces are claimed from one atomic word; workers spin, then park on a futex.
#include "pool.h"

#include <immintrin.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace pk {
namespace {

// About 100 us at 2.5 GHz: longer than the gaps between ops and between steps of a decode loop.
constexpr int64_t kSpinTicks = 250'000;
// With more threads than processors a spinning thread keeps a working one from running.
constexpr int64_t kCrowdedSpinTicks = 5'000;

void futex_wait(std::atomic<uint32_t> *word, uint32_t seen) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t> *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

int32_t allowed_processors() {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    // More than 1024 processors: the fixed set is too small for the system call.
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? static_cast<int32_t>(n) : 1;
}

}  // namespace

Pool::Pool(int32_t n_threads) {
    int32_t allowed = allowed_processors();
    n_active_ = n_threads_ = n_threads > 0 ? n_threads : allowed;
    spin_ticks_ = n_threads_ <= allowed ? kSpinTicks : kCrowdedSpinTicks;
    // Signals belong to the threads of the program that loaded the pack.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    threads_.reserve(n_threads_ - 1);
    try {
        for (int32_t i = 1; i < n_threads_; ++i) threads_.emplace_back([this, i] { worker(i); });
    } catch (...) {
        n_active_ = n_threads_ = static_cast<int32_t>(threads_.size()) + 1;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Pool::~Pool() {
    stop_.store(true);
    signal_.fetch_add(1);
    futex_wake(&signal_);
    limits_.fetch_add(1);
    futex_wake(&limits_);
    for (auto &thread : threads_) thread.join();
}

void Pool::limit(int32_t n_threads) {
    n_active_ = n_threads > 0 && n_threads < n_threads_ ? n_threads : n_threads_;
    limits_.fetch_add(1);
    futex_wake(&limits_);
}

bool Pool::work_once(int32_t thread) {
    uint64_t seen = ticket_.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(seen) != 0) {
        if (thread >= n_threads()) return false;  // left out before this job began
        if (!ticket_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
        uint32_t n_pieces = n_pieces_;
        int64_t begin = (n_pieces - static_cast<uint32_t>(seen)) * grain_;
        int64_t end = begin + grain_ < n_items_ ? begin + grain_ : n_items_;
        call_(context_, begin, end, thread);
        if (done_.fetch_add(1) + 1 == n_pieces && caller_waits_.load()) futex_wake(&done_);
        return true;
    }
    return false;
}

void Pool::run(int64_t n_items, int64_t grain, Call call, const void *context) {
    if ((n_items + grain - 1) / grain > INT32_MAX) grain = n_items / INT32_MAX + 1;
    n_items_ = n_items;
    grain_ = grain;
    call_ = call;
    context_ = context;
    n_pieces_ = static_cast<uint32_t>((n_items + grain - 1) / grain);
    done_.store(0, std::memory_order_relaxed);
    uint64_t job = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    uint32_t n_pieces = n_pieces_;
    ticket_.store(job << 32 | n_pieces);
    wake();
    while (work_once(0)) {
    }
    wait_done(n_pieces);
}

void Pool::wake() {
    if (n_parked_.load() == 0) return;
    n_parked_.store(0);
    signal_.fetch_add(1);
    futex_wake(&signal_);
}

void Pool::wait_done(uint32_t n_pieces) {
    if (done_.load(std::memory_order_acquire) == n_pieces) return;
    int64_t start = static_cast<int64_t>(__rdtsc());
    do {
        for (int i = 0; i < 8; ++i) {
            if (done_.load(std::memory_order_acquire) == n_pieces) return;
            _mm_pause();
        }
    } while (static_cast<int64_t>(__rdtsc()) - start < spin_ticks_);
    caller_waits_.store(1);
    for (;;) {
        uint32_t seen = done_.load();
        if (seen == n_pieces) break;
        futex_wait(&done_, seen);
    }
    caller_waits_.store(0);
}

void Pool::worker(int32_t thread) {
    while (!stop_.load(std::memory_order_relaxed)) {
        const uint32_t limits = limits_.load();
        if (thread >= n_active_.load() && !stop_.load()) {
            futex_wait(&limits_, limits);
            continue;
        }
        if (work_once(thread)) continue;
        int64_t start = static_cast<int64_t>(__rdtsc());
        bool found = false;
        do {
            for (int i = 0; i < 8 && !found; ++i) {
                _mm_pause();
                found = static_cast<uint32_t>(ticket_.load(std::memory_order_relaxed)) != 0;
            }
        } while (!found && static_cast<int64_t>(__rdtsc()) - start < spin_ticks_);
        if (found) continue;
        uint32_t seen = signal_.load();
        n_parked_.fetch_add(1);
        // A job or a stop that came before the count was raised did not see a parked worker: look again.
        if (static_cast<uint32_t>(ticket_.load()) != 0 || stop_.load()) continue;
        futex_wait(&signal_, seen);
    }
}

}  // namespace pk
