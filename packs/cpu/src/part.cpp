// The thread that runs a part's steps.
#include "part.h"

#include <signal.h>

#include "../../host/error.h"
#include "../../pack.h"

namespace pk {

Part::Part() {
    // Signals belong to the threads of the program that loaded the pack.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { work(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Part::~Part() {
    {
        std::lock_guard guard(lock_);
        stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

bool Part::is_busy() {
    std::lock_guard guard(lock_);
    return body_ || status_;
}

bool Part::give(std::function<int32_t()> body) {
    {
        std::lock_guard guard(lock_);
        if (body_ || status_) return false;
        body_ = std::move(body);
    }
    changed_.notify_all();
    return true;
}

int32_t Part::take_failure() {
    std::lock_guard guard(lock_);
    if (!status_) return PK_OK;
    const int32_t status = status_;
    status_ = PK_OK;
    return fail(status, "%s", sentence_.c_str());
}

void Part::settle() {
    std::unique_lock guard(lock_);
    changed_.wait(guard, [this] { return !body_; });
}

void Part::work() {
    std::unique_lock guard(lock_);
    for (;;) {
        changed_.wait(guard, [this] { return stop_ || body_; });
        if (!body_) return;
        guard.unlock();
        const int32_t status = body_();
        const std::string sentence = status ? last_error() : "";
        guard.lock();
        body_ = nullptr;
        status_ = status;
        sentence_ = sentence;
        changed_.notify_all();
    }
}

}  // namespace pk
