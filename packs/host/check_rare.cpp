// Checks of the records of rare.h.
#include "../rare.h"
#include "check.h"

namespace pk {
namespace {

class RareChecker : Checks {
   public:
    using Checks::Checks;

    int32_t check() const {
        switch (record_.op) {
            case PK_OP_SOFTPLUS: return softplus(record_.as<pk_op_softplus>());
            default: return PK_OK;
        }
    }

   private:
    int32_t softplus(const pk_op_softplus &op) const {
        if (int32_t status = activation("x", op.x)) return status;
        if (int32_t status = activation("g", op.g)) return status;
        if (int32_t status = same_rows("x", op.x, "g", op.g)) return status;
        if (int32_t status = equal("x width modulo g width", op.x.cols % op.g.cols, "wanted", 0)) return status;
        return like("x", op.x, "out", op.out);
    }
};

}  // namespace

int32_t check_rare(int64_t index, const Record &record, const pk_state &state, const Support &support) {
    return RareChecker(index, record, state, support).check();
}

}  // namespace pk
