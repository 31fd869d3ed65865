// A stand-in for CANN's libllm_datadist.so: unpacks the C++ arguments and asks the simulated runtime, which knows the
// calling thread's device and all memory, and keeps the log.

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "ascend_string.h"

extern "C" {
std::uint64_t haulier_sim_adxl_create();
void haulier_sim_adxl_destroy(std::uint64_t engine);
std::uint32_t haulier_sim_adxl_initialize(std::uint64_t engine, const char *name);
void haulier_sim_adxl_finalize(std::uint64_t engine);
std::uint32_t haulier_sim_adxl_register(std::uint64_t engine, std::uint64_t address, std::size_t bytes, std::int32_t type,
                                        std::uint64_t *handle);
std::uint32_t haulier_sim_adxl_deregister(std::uint64_t engine, std::uint64_t handle);
std::uint32_t haulier_sim_adxl_connect(std::uint64_t engine, const char *name, std::int32_t milliseconds);
std::uint32_t haulier_sim_adxl_disconnect(std::uint64_t engine, const char *name, std::int32_t milliseconds);
std::uint32_t haulier_sim_adxl_transfer(std::uint64_t engine, const char *name, std::size_t count);
}

namespace adxl {

enum MemType : std::int32_t { MEM_DEVICE = 0, MEM_HOST = 1 };
enum TransferOp : std::int32_t { READ = 0, WRITE = 1 };

struct MemDesc {
    std::uintptr_t address;
    std::size_t bytes;
    std::uint8_t reserved[128];
};
static_assert(sizeof(MemDesc) == 144);

struct TransferOpDesc {
    std::uintptr_t local;
    std::uintptr_t remote;
    std::size_t bytes;
};
static_assert(sizeof(TransferOpDesc) == 24);

class AdxlEngine {
public:
    AdxlEngine();
    ~AdxlEngine();
    std::uint32_t Initialize(const ge::AscendString &name, const std::map<ge::AscendString, ge::AscendString> &options);
    void Finalize();
    std::uint32_t RegisterMem(const MemDesc &memory, MemType type, void *&handle);
    std::uint32_t DeregisterMem(void *handle);
    std::uint32_t Connect(const ge::AscendString &remote, std::int32_t milliseconds);
    std::uint32_t Disconnect(const ge::AscendString &remote, std::int32_t milliseconds);
    std::uint32_t TransferSync(const ge::AscendString &remote, TransferOp op, const std::vector<TransferOpDesc> &parts,
                               std::int32_t milliseconds);

private:
    // One pointer in the interface; here the engine's number.
    std::uint64_t engine_;
};
static_assert(sizeof(AdxlEngine) == 8);

AdxlEngine::AdxlEngine() : engine_(haulier_sim_adxl_create()) {}

AdxlEngine::~AdxlEngine() { haulier_sim_adxl_destroy(engine_); }

std::uint32_t AdxlEngine::Initialize(const ge::AscendString &name,
                                     const std::map<ge::AscendString, ge::AscendString> &) {
    return haulier_sim_adxl_initialize(engine_, name.text());
}

void AdxlEngine::Finalize() { haulier_sim_adxl_finalize(engine_); }

std::uint32_t AdxlEngine::RegisterMem(const MemDesc &memory, MemType type, void *&handle) {
    std::uint64_t number = 0;
    const auto status = haulier_sim_adxl_register(engine_, memory.address, memory.bytes, type, &number);
    if (status == 0) {
        handle = reinterpret_cast<void *>(number);
    }
    return status;
}

std::uint32_t AdxlEngine::DeregisterMem(void *handle) {
    return haulier_sim_adxl_deregister(engine_, reinterpret_cast<std::uint64_t>(handle));
}

std::uint32_t AdxlEngine::Connect(const ge::AscendString &remote, std::int32_t milliseconds) {
    return haulier_sim_adxl_connect(engine_, remote.text(), milliseconds);
}

std::uint32_t AdxlEngine::Disconnect(const ge::AscendString &remote, std::int32_t milliseconds) {
    return haulier_sim_adxl_disconnect(engine_, remote.text(), milliseconds);
}

std::uint32_t AdxlEngine::TransferSync(const ge::AscendString &remote, TransferOp,
                                       const std::vector<TransferOpDesc> &parts, std::int32_t) {
    return haulier_sim_adxl_transfer(engine_, remote.text(), parts.size());
}

} // namespace adxl
