-- What becomes of a finished or failed part of a stage: its results go to the next stage, to the
-- inbox of a join or reduce, or to the results of the flow.

-- Filed under the origin of an item that ends without a result: it dropped out, or it failed. Both
-- are results without items, in a form that no handler's result has: a reader goes on past them.
local NOTHING, FAILED = "\220\0\0", "\221\0\0\0\0"
-- Begins the field of a failed child in the inbox of its join. No result begins so.
local FAILED_CHILD = "\193"
-- One HSET writes at most so many fields.
local FIELDS_AT_ONCE = 2000

-- Returns an origin, or a text that ends with one, as a redrive of it yields it.
local function of_run(text, run)
  return string.gsub(text, "%.%d+$", "") .. "." .. run
end

-- Adds a part to another stage, whose keys are `s`.
local function add_part(f, s, about, payload)
  local stage = stage_at(f, s.number)
  local number = stage.total + 1
  redis.call("XADD", s.parts, number, about, payload)
  stage.total, stage.bytes = number, stage.bytes + #payload
  stage.added = (stage.added or 0) + (tonumber(string.match(about, "^%d+")) or 0)
  s.is_touched = true
  f.added = f.added + 1
  if f.items then
    redis.call("HSET", f.items, string.match(about, "@(.*)$"), s.number .. ":" .. number)
  end
  if s.number == f.own then
    -- A part of the tree that it is of: no other script writes its counts.
    put(stage, "total", stage.total)
    redis.call("HINCRBY", f.k.meta, "records", 1)
  end
  return number
end

-- Adds many parts at once; `payloads` has those of all, `records` is how many they have in all.
local function add_parts(f, s, abouts, sizes, payloads, records)
  local stage, key = stage_at(f, s.number), s.parts
  local total, at = stage.total, 1
  for i = 1, #abouts do
    local size = sizes[i]
    redis.call("XADD", key, total + i, abouts[i], string.sub(payloads, at, at + size - 1))
    at = at + size
  end
  stage.total, stage.bytes = total + #abouts, stage.bytes + #payloads
  stage.added = (stage.added or 0) + records
  s.is_touched = true
  f.added = f.added + #abouts
end

-- A group has no unfinished child any more: its join part is made, or runs again. There is one for
-- each group. Its inputs stay in the inbox until it is finished.
local function complete(f, group)
  local number = redis.call("HGET", f.groups, group .. "@")
  if not number then
    number = add_part(f, f.join, "1@" .. group, "")
    redis.call("HSET", f.groups, group .. "@", number)
  elseif redis.call("HDEL", f.join.failed, number) == 1 then
    redrive_part(f, f.join, number)
  end
end

-- Counts a child of a group as finished, when the fields that go before it are written.
local function count_child(f, origin)
  local group = string.match(origin, "^(.*)/")
  if not f.downs[group] then
    f.downs[group] = 0
    f.order[#f.order + 1] = group
  end
  f.downs[group] = f.downs[group] + 1
end

local function put_field(f, origin, value)
  local n = #f.fields
  f.fields[n + 1], f.fields[n + 2] = origin, value
end

local function write_fields(key, fields)
  for first = 1, #fields, FIELDS_AT_ONCE do
    redis.call("HSET", key, unpack(fields, first, math.min(#fields, first + FIELDS_AT_ONCE - 1)))
  end
end

-- Returns whether the item's end is shown in the results: not if a join or a reduce waits for it.
local function is_filed(f)
  return not f.grouped and not f.barrier
end

-- Keeps what an item came to in this stage, where the flow is traced.
local function note_trace(f, label, payload)
  if f.trace then
    redis.call("HSET", f.trace, (string.match(label, "@(.*)$") or label) .. ":" .. f.own, payload)
  end
end

-- Notes that a result has arrived at a tree. When enough have, a part is made of them.
local function arrive(f, t, payload)
  t.arrived, t.is_touched = t.arrived + 1, true
  if f.kind == "reduce" then
    redis.call("HSET", t.b.got, t.arrived, payload)
  else
    put_field(f, t.arrived, payload)
  end
  if t.arrived - t.assigned >= t.width then
    add_part(f, t.b, string.format("1@%d-%d", t.assigned + 1, t.arrived), "")
    t.assigned = t.arrived
  end
end

-- Hands a result over. `label` is what the next stage says about the part, or its origin.
local function hand_over(f, label, payload)
  note_trace(f, label, payload)
  if f.feeds == "parts" then
    add_part(f, f.next, label, payload)
  elseif f.feeds == "join" and f.grouped then
    put_field(f, label, payload)
    count_child(f, label)
  elseif f.feeds == "reduce" and tree_of(f) then
    arrive(f, f.tree, payload)
  else
    put_field(f, label, payload)
  end
end

-- Notes that an item goes no further, without a result of its own.
local function drop_out(f, origin, mark)
  note_trace(f, origin, mark)
  if f.grouped then
    -- It may have failed before, and been run again.
    redis.call("HDEL", f.join.got, origin)
    count_child(f, origin)
  elseif is_filed(f) then
    redis.call("HSET", f.results, origin, mark)
  end
end

-- Notes how many children a part of a spread has. `kept` is for the join of them.
local function spread_out(f, origin, count, kept)
  if not f.join then
    redis.call("HSET", f.kids, origin, count)
    if count == 0 then
      drop_out(f, origin, NOTHING)
    end
    return
  end
  redis.call("HSET", f.groups, origin, f.feeds == "join" and 0 or count, origin .. "#", count)
  if kept ~= "" then
    redis.call("HSET", f.join.got, origin .. "/0", kept)
  end
  if count == 0 or f.feeds == "join" then
    f.order[#f.order + 1] = origin
    f.downs[origin] = 0
  end
end

-- Forgets the inputs of a join or reduce whose part is finished.
local function empty_inbox(f, origin)
  if f.kind == "reduce" then
    local first, last = run_of(origin)
    local fields = {}
    for arrival = tonumber(first) or 1, tonumber(last) or 0 do
      fields[#fields + 1] = arrival
    end
    if first then
      redis.call("HDEL", f.got, unpack(fields))
    else
      redis.call("UNLINK", f.got)
    end
    return
  end
  local count = tonumber(redis.call("HGET", f.groups, origin .. "#")) or 0
  local fields = {}
  for child = 0, count do
    fields[child + 1] = origin .. "/" .. child
  end
  redis.call("HDEL", f.got, unpack(fields))
  redis.call("HDEL", f.groups, origin, origin .. "#", origin .. "!", origin .. "@")
end

-- Writes what was noted: inboxes and results first, then groups are counted down.
local function settle(f)
  if #f.fields > 0 then
    local key = f.results
    if f.feeds == "join" then
      key = f.join.got
    elseif f.feeds == "reduce" then
      key = f.barrier.got
    end
    write_fields(key, f.fields)
    f.fields = {}
  end
  for _, group in ipairs(f.order) do
    if tonumber(redis.call("HINCRBY", f.groups, group, 0 - f.downs[group])) == 0 then
      complete(f, group)
    end
  end
  f.downs, f.order = {}, {}
end

-- Returns whether a stage up to this one has a failed part that the reduce would miss. A failed
-- child is missed by its join, and not by the reduce.
local function has_failure(f, last)
  for number = 1, last do
    local found = redis.call("HMGET", meta_of(f, number), "failed", "facts")
    local failed = number == f.own and f.r.failed or tonumber(found[1]) or 0
    if failed > 0 and not string.find(found[2], "^%a+ %a+ %d+ %d+ 1 ") then
      return true
    end
  end
  return false
end

-- Returns whether more failed in one of the stages than it tolerates. A flow whose reduce failed
-- has failed.
local function is_any_intolerable(f)
  for number = 1, f.stages do
    local s = { unit = "", failed = 0, done = 0 }
    local names = { "failed", "done", "records_failed", "records_done", "max_failures", "max_percent" }
    local meta = meta_of(f, number)
    for i, value in ipairs(redis.call("HMGET", meta, unpack(names))) do
      s[names[i]] = tonumber(value) or 0
    end
    local words = redis.call("HMGET", meta, "unit", "kind")
    s.unit = words[1] or ""
    if is_intolerable(s, true) or (words[2] == "reduce" and s.failed > 0) then
      return true
    end
  end
  return false
end

-- Writes the end into every stage, so that no stage goes on (rule F12).
local function end_all(f, state)
  for number = 1, f.stages do
    if number ~= f.own then
      redis.call("HSET", meta_of(f, number), "state", state, "finished_ms", f.now)
      if f.loaded[number] then
        f.loaded[number].state = state
      end
    end
  end
end

-- Everything before the reduce is finished: it begins, or its final part comes back. Returns whether
-- it does.
local function begin_reduce(f)
  local t = tree_of(f)
  local b = t and t.b or f.barrier
  local stage = b and stage_at(f, b.number)
  if not stage or f.is_final_over then
    return false
  end
  if t and t.final == 0 then
    t.final, t.is_touched = add_part(f, b, "1@1", ""), true
    return true
  end
  if not t and stage.total == 0 then
    add_part(f, b, "1@1", "")
    return true
  end
  local final = t and t.final or 1
  if redis.call("HEXISTS", b.failed, final) == 0 then
    return false
  end
  local runs = redis.call("HGET", meta_of(f, b.number), "on_failure") == "run"
  if not runs and (has_failure(f, b.number - 1) or (t and failed_runs(f, t) > 0)) then
    return false
  end
  redis.call("HDEL", b.failed, final)
  redrive_part(f, b, final)
  return true
end

-- Counts finished parts, after everything that they yielded was added (rule F4). At 0 the reduce
-- begins, or the flow ends. Returns whether it has ended.
local function count_flow(f, finished)
  settle(f)
  save_tree(f)
  local change = f.added - finished
  f.added = 0
  if change ~= 0 then
    change = redis.call("INCRBY", f.k.left, change)
  else
    return false
  end
  if change > 0 or not is_live(f.r) then
    return false
  end
  local begins = begin_reduce(f)
  save_tree(f)
  if begins then
    redis.call("INCRBY", f.k.left, f.added)
    f.added = 0
    return false
  end
  load_more(f.k.meta, f.r)
  save(f.k.meta, f.r)
  redis.call("UNLINK", f.k.leases, f.k.holders, f.k.retry)
  end_request(f.k, f.r, f.now, is_any_intolerable(f) and "failed" or "done")
  return true
end

-- Notes that a part was given up: its item fails, and a group counts it down. `f.result` is what
-- its good records yielded, and goes on.
local function give_up_item(f, number, t, failure)
  local entry = redis.call("XRANGE", f.k.parts, number, number)[1]
  local origin = entry and origin_of(entry[2][1], number) or number
  if f.kind == "reduce" and run_of(origin) then
    return
  end
  f.is_final_over = f.kind == "reduce"
  if t.run > 0 and not f.grouped then
    origin = of_run(origin, t.run)
  end
  if f.grouped then
    redis.call("HSET", f.join.got, origin, FAILED_CHILD .. failure)
    redis.call("HINCRBY", f.groups, string.match(origin, "^(.*)/") .. "!", 1)
    count_child(f, origin)
  elseif f.result then
    local label = origin
    if f.feeds == "parts" then
      label = f.result.records .. string.match(entry[2][1], "^%d+j?([^@]*)") .. "@" .. origin
    end
    hand_over(f, label, f.result.payload)
  elseif is_filed(f) then
    redis.call("HSET", f.results, origin, FAILED)
  end
end

-- Begins a script that may finish a part, or give it up; as begin_flow().
local function enter_flow(k, r, now)
  local f, refused = begin_flow(k, r, now)
  if f then
    f.count, f.give_up, f.end_all = count_flow, give_up_item, end_all
    r.flow = f
  end
  return f, refused
end
