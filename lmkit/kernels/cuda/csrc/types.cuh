// Integer types by their number of bits: NVRTC has no <cstdint>.
#pragma once

using u8 = unsigned char;
using i8 = signed char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;
