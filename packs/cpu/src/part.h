// Who runs the steps of a context that pk_part made: a thread of its own, one step at a time.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace pk {

class Part {
   public:
    Part();
    ~Part();
    Part(const Part &) = delete;
    Part &operator=(const Part &) = delete;

    // Something runs, or has failed and nobody has been told.
    bool is_busy();
    // Runs body on the thread. False: it is busy.
    bool give(std::function<int32_t()> body);
    // The status of a body that failed, with its sentence as the calling thread's last error: told once. PK_OK: none has.
    int32_t take_failure();
    // Waits until nothing runs.
    void settle();

   private:
    void work();

    std::mutex lock_;
    std::condition_variable changed_;
    std::function<int32_t()> body_;  // empty: nothing runs
    int32_t status_ = 0;
    std::string sentence_;
    bool stop_ = false;
    std::thread thread_;
};

}  // namespace pk
