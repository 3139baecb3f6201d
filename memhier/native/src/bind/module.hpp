// The parts of the Python module: each source file that Python calls into has one function that registers its calls.
#pragma once

#include <nanobind/nanobind.h>

void register_allowed(nanobind::module_& m);
void register_belady(nanobind::module_& m);
void register_bitmaps(nanobind::module_& m);
void register_code_scan(nanobind::module_& m);
void register_code_waves(nanobind::module_& m);
void register_io_calls(nanobind::module_& m);
void register_decoder(nanobind::module_& m);
void register_distance(nanobind::module_& m);
void register_embedding(nanobind::module_& m);
void register_hash_words(nanobind::module_& m);
void register_id_map(nanobind::module_& m);
void register_links(nanobind::module_& m);
void register_list_graph(nanobind::module_& m);
void register_max_sim(nanobind::module_& m);
void register_exact_max_sim(nanobind::module_& m);
void register_nearest_lists(nanobind::module_& m);
void register_offline(nanobind::module_& m);
void register_places(nanobind::module_& m);
void register_policies(nanobind::module_& m);
void register_pq_scan(nanobind::module_& m);
void register_reader(nanobind::module_& m);
void register_search(nanobind::module_& m);
void register_slotmap(nanobind::module_& m);
void register_sum_tree(nanobind::module_& m);
void register_swap_step(nanobind::module_& m);
void register_turn(nanobind::module_& m);
