#include "vgpu/ptx.h"

#include "vgpu/parser.h"

namespace tw::vgpu::ptx {

struct TypeRow {
  Type type;
  std::string_view name;
  int bits;
};
static constexpr TypeRow kTypes[] = {
    {Type::pred, "pred", 1},    {Type::b8, "b8", 8},      {Type::b16, "b16", 16},
    {Type::b32, "b32", 32},     {Type::b64, "b64", 64},   {Type::b128, "b128", 128},
    {Type::u8, "u8", 8},        {Type::u16, "u16", 16},   {Type::u32, "u32", 32},
    {Type::u64, "u64", 64},     {Type::s8, "s8", 8},      {Type::s16, "s16", 16},
    {Type::s32, "s32", 32},     {Type::s64, "s64", 64},   {Type::f16, "f16", 16},
    {Type::f16x2, "f16x2", 32}, {Type::bf16, "bf16", 16}, {Type::bf16x2, "bf16x2", 32},
    {Type::tf32, "tf32", 32},   {Type::f32, "f32", 32},   {Type::f64, "f64", 64},
};

std::optional<Type> type_named(std::string_view name) {
  for (const TypeRow& row : kTypes)
    if (row.name == name) return row.type;
  return std::nullopt;
}
std::string_view name_of(Type type) {
  for (const TypeRow& row : kTypes)
    if (row.type == type) return row.name;
  return "none";
}
int bits_of(Type type) {
  for (const TypeRow& row : kTypes)
    if (row.type == type) return row.bits;
  return 0;
}
bool is_float(Type type) { return type >= Type::f16; }
bool is_signed(Type type) { return type >= Type::s8 && type <= Type::s64; }

Module parse(std::string_view text) { return Parser(text).module(); }

}  // namespace tw::vgpu::ptx
