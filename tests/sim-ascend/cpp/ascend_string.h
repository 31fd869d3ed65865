// ge::AscendString as callers see it: copying and destruction are compiled into them, so the layout is the interface.
#pragma once

#include <memory>
#include <string>

namespace ge {

class AscendString {
public:
    explicit AscendString(const char *text);
    bool operator<(const AscendString &other) const;
    const char *text() const { return name_ ? name_->c_str() : ""; }

private:
    std::shared_ptr<std::string> name_;
};

static_assert(sizeof(AscendString) == 16);

} // namespace ge
