// A stand-in for CANN's libmetadef.so: what Mooncake's Ascend transport takes from it.

#include "ascend_string.h"

namespace ge {

AscendString::AscendString(const char *text)
    : name_(text ? std::make_shared<std::string>(text) : nullptr) {}

bool AscendString::operator<(const AscendString &other) const {
    if (!name_ || !other.name_) {
        return !name_ && other.name_;
    }
    return *name_ < *other.name_;
}

} // namespace ge
