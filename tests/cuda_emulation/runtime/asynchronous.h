// Work that the hardware does concurrently with the threads: when it is done is chosen by settings.arrivals.
#pragma once
#include <functional>
#include <string>

#include "ordering.h"

namespace emulation {

// Does the work at once, or keeps it until no thread can go on.
void do_later(std::function<void()> work);
// Does one item of the queued work; false if there is none.
bool run_asynchronous();

void reset_asynchronous();
// The block has ended: fails if bulk copies or wgmmas are in flight.
void end_asynchronous();

std::string describe_mbarrier(uint32_t address);
// A bulk copy has written `bytes`: the mbarrier hears of it.
void complete_bytes(uint32_t mbarrier, uint32_t bytes, const Clock& clock);
// Fails unless bulk copies may use the mbarrier.
void check_mbarrier_for_bulk(uint32_t address);
void arrive_for_copies(uint32_t mbarrier, const Clock& clock, int extra);
void reset_mbarriers();
void reset_cp_async();
void reset_bulk();
void end_bulk();
void reset_wgmma();
void end_wgmma();

}  // namespace emulation
