// `Queue`: items in a row of memory, added behind and taken in front. A queue of few items touches one line of the
// cache, where `std::deque` has two blocks of its own: most of what a gateway waits for with many queue pairs.
#pragma once
#include <iterator>
#include <utility>
#include <vector>

namespace isthmus {

template <class Item> class Queue {
  public:
    auto begin() { return items_.begin() + first_; }
    auto end() { return items_.end(); }
    auto begin() const { return items_.begin() + first_; }
    auto end() const { return items_.end(); }
    auto rbegin() { return items_.rbegin(); }
    auto rend() { return std::make_reverse_iterator(begin()); }
    size_t size() const { return items_.size() - size_t(first_); }
    bool empty() const { return size() == 0; }
    Item &front() { return items_[size_t(first_)]; }
    const Item &front() const { return items_[size_t(first_)]; }
    Item &back() { return items_.back(); }
    const Item &back() const { return items_.back(); }
    Item &operator[](size_t place) { return items_[size_t(first_) + place]; }
    void push_back(Item item) { items_.push_back(std::move(item)); }
    void push_front(Item item) { items_.insert(begin(), std::move(item)); }
    void pop_back() {
        items_.pop_back();
        tidy();
    }
    void pop_front() {
        items_[size_t(first_++)] = Item();
        tidy();
    }
    void clear() {
        if (items_.capacity() > 64) items_ = {};
        items_.clear();
        first_ = 0;
    }

  private:
    void tidy() {  // what was taken is at most as much as what waits, or little
        if (empty()) {
            clear();
        } else if (first_ >= 16 && size_t(first_) > items_.size() / 2) {
            items_.erase(items_.begin(), begin());
            first_ = 0;
        }
    }
    std::vector<Item> items_;
    std::ptrdiff_t first_ = 0;
};

}  // namespace isthmus
