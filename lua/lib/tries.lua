-- What went wrong with a part so far, as "errors crashes alone run records". Only parts that had
-- trouble, or were snoozed, have an entry. `alone`: the part must be handed out by itself. `run`:
-- how often it was redriven. `records`: how many of its records failed, once it was given up; 0
-- before.
local function read_tries(text)
  local t = { errors = 0, crashes = 0, alone = 0, run = 0, records = 0 }
  if text then
    local e, c, a, n, f = string.match(text, "^(%d+) (%d+) (%d+) (%d+) (%d+)$")
    if e then
      t.errors, t.crashes, t.alone, t.run, t.records =
        tonumber(e), tonumber(c), tonumber(a), tonumber(n), tonumber(f)
    end
  end
  return t
end

local function tries_text(t)
  return table.concat({ t.errors, t.crashes, t.alone, t.run, t.records }, " ")
end

local function write_tries(tries, number, t)
  redis.call("HSET", tries, number, tries_text(t))
end

-- Returns the number of records of a part. An entry has one field: its name begins with that number
-- and tells where the part came from, its value is the payload.
local function records_of(parts, number)
  local entry = redis.call("XRANGE", parts, number, number)[1]
  return entry and tonumber(string.match(entry[2][1], "^%d+")) or 0
end

-- Returns whether an earlier run of a part has yielded results of some of its records, so that a
-- result of all of them must not come after it.
local function has_delivered(parts, number, t)
  return t.run > 0 and t.records < records_of(parts, number)
end
