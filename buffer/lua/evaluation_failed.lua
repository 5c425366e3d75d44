-- A server could not answer a slice of an evaluation. ARGV: ticket id, patience: how often before it counts, retries: how
-- often the slice is then handed out again at once; after that it waits for its deadline, or a task that can't be
-- answered would keep the servers busy for ever. Returns 'again' (patience is left), 'filtered' or 'void'.
local version = ARGV[1]:match('^e(%d+)%-%d')
if not version then return 'void' end
for _, slice in ipairs(redis.call('ZRANGE', key('eval_issued:' .. version), 0, -1)) do
  if slice_ticket(version, slice) == ARGV[1] then
    local failures = redis.call('HINCRBY', key('eval_failures:' .. version), slice, 1) - tonumber(ARGV[2])
    if failures <= 0 then return 'again' end
    if failures <= tonumber(ARGV[3]) then
      return_slice(version, slice)
    else
      redis.call('HDEL', key('eval_holder:' .. version), slice)  -- nobody holds it, so nobody can lose it
    end
    return 'filtered'
  end
end
return 'void'
