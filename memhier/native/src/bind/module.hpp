// One registration function per translation unit; module.cpp calls them all.
#pragma once

#include <nanobind/nanobind.h>

void register_belady(nanobind::module_& m);
void register_code_scan(nanobind::module_& m);
void register_crc32c(nanobind::module_& m);
void register_decode_links(nanobind::module_& m);
void register_decoder(nanobind::module_& m);
void register_distance(nanobind::module_& m);
void register_embedding(nanobind::module_& m);
void register_fence(nanobind::module_& m);
void register_nearest_lists(nanobind::module_& m);
void register_offline(nanobind::module_& m);
void register_policies(nanobind::module_& m);
void register_pq_scan(nanobind::module_& m);
void register_reader(nanobind::module_& m);
void register_slotmap(nanobind::module_& m);
void register_turn(nanobind::module_& m);
