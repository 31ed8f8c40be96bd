// The host's side of shared prefixes: which op asks, and whether rows of a step share pages at all.
#pragma once
#include <cstdint>
#include <vector>

#include "../../host/program.h"
#include "../../host/step.h"
#include "context.h"
#include "slot_pages.h"

namespace pk {

// Whether an attention op reads what rows share, and its pass over that, in front of launch_attention: it does nothing when rows share nothing.
// is_ahead: it may begin before the launch in front has ended, and so may launch_attention's, which reads what launch_share() wrote; a pass
// that is switched off takes no time then.
bool reads_share(const Launch &l, const pk_op_attention &op);
int32_t launch_shared(const Launch &l, const pk_op_attention &op, bool is_ahead);

// Knows, of every slot, the page at the end of the shortest prefix that is worth sharing: two rows with the same one share it.
// Steps whose rows share nothing run graphs without the launches that shared prefixes need.
class SharedRows {
  public:
    // The first record that reads shared prefixes; -1 when none can. Others take part when their heads are as many.
    void open(pk_ctx &ctx, const Records &records, const pk_state &state);
    int64_t record() const { return record_; }
    void write(const Step &step);  // page writes of a step
    bool any(const Step &step);    // do two rows of the step share?
    // The same for the rows that lie on the device. Waits for it.
    int32_t any_on_device(const pk_state &state, int32_t n_rows, bool *out);

  private:
    bool has_twins();
    int64_t record_ = -1;
    int32_t index_ = 0;
    std::shared_ptr<SlotPages> slots_;
    std::vector<int32_t> found_;
};

}  // namespace pk
