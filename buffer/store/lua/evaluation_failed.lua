-- A server could not answer a slice of an evaluation. ARGV: ticket id, patience: how often before it counts, retries: how
-- often the slice is then handed out again; after that its tasks count as failed, or the evaluation would never end.
-- Returns 'again' (patience is left), 'filtered' or 'void'.
local version = ARGV[1]:match('^e(%d+)%-%d')
if not version then return 'void' end
for _, slice in ipairs(redis.call('ZRANGE', key('eval_issued:' .. version), 0, -1)) do
  if slice_ticket(version, slice) == ARGV[1] then
    local failures = redis.call('HINCRBY', key('eval_failures:' .. version), slice, 1) - tonumber(ARGV[2])
    if failures <= 0 then return 'again' end
    if failures <= tonumber(ARGV[3]) then
      return_slice(version, slice)
    else
      end_slice(version, slice)
      settle_tasks(version, 0, slice:match(':(%d+)'))
    end
    return 'filtered'
  end
end
return 'void'
