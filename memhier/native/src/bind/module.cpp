// The Python module of the compiled core.
#include "bind/module.hpp"

NB_MODULE(_core, m) {
  m.doc() = "memhier's compiled core: batched page reads and the kernels that follow them.";
  // Objects that a user leaves open when Python ends are no leak to report.
  nanobind::set_leak_warnings(false);
  register_allowed(m);
  register_belady(m);
  register_bitmaps(m);
  register_code_scan(m);
  register_code_waves(m);
  register_io_calls(m);
  register_decoder(m);
  register_distance(m);
  register_embedding(m);
  register_hash_words(m);
  register_id_map(m);
  register_links(m);
  register_list_graph(m);
  register_max_sim(m);
  register_exact_max_sim(m);
  register_nearest_lists(m);
  register_offline(m);
  register_places(m);
  register_policies(m);
  register_pq_scan(m);
  register_reader(m);
  register_search(m);
  register_slotmap(m);
  register_sum_tree(m);
  register_swap_step(m);
  register_turn(m);
}
